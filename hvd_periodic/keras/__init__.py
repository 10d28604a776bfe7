"""What front ends for Keras share, whatever the backend of Keras."""
