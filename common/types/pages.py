"""Settings of page storage: eviction policies, the form of a page below the host, the pages written back."""

from __future__ import annotations

from typing import Literal

Eviction = Literal["lru", "lru-conversation", "s3fifo", "pensieve", "spillway"]
PageForm = Literal["exact", "int8"]
PagePublish = Literal["through", "selective", "back"]
