"""Every message is explained, and what is explained is a message."""

from __future__ import annotations

from tests.messages import explained, messages, texts


def test_every_message_is_explained() -> None:
    missing = messages().keys() - set(explained())
    assert not missing, "for docs/troubleshooting:\n" + "\n".join(sorted(missing))


def test_what_is_explained_can_be_read() -> None:
    written = texts()
    gone = [line for line in explained() if max(line.split("…"), key=len) not in written]
    assert not gone, "no message any more:\n" + "\n".join(gone)
