"""The three optimizers of ``tf.contrib.opt`` on Horovod, and one for other algorithms, for TensorFlow 1 graphs.

Example::

    import horovod.tensorflow as hvd
    import tensorflow.compat.v1 as tf
    from hvd_periodic.tensorflow import contrib_opt

    hvd.init()
    getter = contrib_opt.ElasticAverageCustomGetter(worker_device="")
    with tf.variable_scope("", custom_getter=getter):
        loss = model()
    optimizer = contrib_opt.ElasticAverageOptimizer(tf.train.GradientDescentOptimizer(0.1), hvd.size(), getter)
    train_op = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
    hook = optimizer.make_session_run_hook(is_chief=hvd.rank() == 0, task_index=hvd.rank())
    with tf.train.MonitoredTrainingSession(hooks=[hook]) as session:
        while not session.should_stop():
            session.run(train_op)
"""

from hvd_periodic.tensorflow.contrib_opt.agn import AGNOptimizer
from hvd_periodic.tensorflow.contrib_opt.elastic_average import ElasticAverageOptimizer
from hvd_periodic.tensorflow.contrib_opt.getters import (
    GLOBAL_VARIABLE_NAME,
    GRAD_VARIABLE_NAME,
    LOCAL_VARIABLE_NAME,
    AGNCustomGetter,
    ElasticAverageCustomGetter,
    ModelAverageCustomGetter,
    PeriodicCustomGetter,
)
from hvd_periodic.tensorflow.contrib_opt.model_average import ModelAverageOptimizer
from hvd_periodic.tensorflow.contrib_opt.periodic import PeriodicOptimizer

__all__ = [
    "GLOBAL_VARIABLE_NAME",
    "GRAD_VARIABLE_NAME",
    "LOCAL_VARIABLE_NAME",
    "AGNCustomGetter",
    "AGNOptimizer",
    "ElasticAverageCustomGetter",
    "ElasticAverageOptimizer",
    "ModelAverageCustomGetter",
    "ModelAverageOptimizer",
    "PeriodicCustomGetter",
    "PeriodicOptimizer",
]
