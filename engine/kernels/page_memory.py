"""Page pools: the memory of KV pages, one tensor per layer group."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ConfigError
from common.pages.identity import PAGE
from common.transport.memory_segment import LARGE, MemorySegment
from engine.models.decoders.spec import DecoderSpec

LAYOUT = 2  # version of the packed layout, in which pages leave the host (see `pack`); part of the fingerprint
SEQUENCES = 64  # unless configured, a pool has room for at most this many sequences of full context
HOST_TIMES = 4  # unless configured, the host has at most this many times the device's pages
TOUCHED = 256 << 20  # bytes of a device's pages on a CPU that are allocated at the start
SHARE_CPU, _SHARE_HOST, _SHARE_DEVICE = 0.4, 0.25, 0.8
_MADV_POPULATE_WRITE = 23  # Linux' number, which Python lacks
_MEMINFO = Path("/proc/meminfo")
_CGROUP = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


class PageMemory:
    """The pages of one layer group: (pages, layers, 2, kv heads, PAGE, dim), each page contiguous in memory.

    `layers` are the numbers of the group's layers in the model, `window` is the number of positions that a row sees
    (None: all); `scale` and `cap` are the factor and the soft cap of attention scores (see `DecoderSpec`). Keys and
    values have the plain layout, which torch and Triton read, or are `packed` for the compiled kernels. A host
    allocates the memory of a page when the page is first written, but for those of the first `touched` bytes.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        window: int | None,
        layers: Sequence[int],
        pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        segment: MemorySegment | None = None,
        packed: bool = False,
        touched: int = 0,
    ) -> None:
        """Allocate the memory: part of a host's `segment`, if given, else of `device`."""
        self.segment = segment
        self.packed = packed
        self.window = window
        self.layers = list(layers)
        self.kv_heads = spec.kv_heads
        self.scale, self.cap = spec.attention_scale, spec.score_cap
        shape = (pages, len(layers), 2, spec.kv_heads, PAGE, spec.head_dim)
        self.offset = 0
        # By page and layer: the number of writes other than attention's appended rows.
        self.versions: NDArray[np.uint32] | None = None
        if segment is None:
            self.data = _zeros(shape, dtype, device, touched)
        else:
            self.versions = np.zeros((pages, len(layers)), np.uint32)
            self.offset = segment.take(pages * page_bytes(spec, len(layers), dtype))
            self.data = _part(segment, self.offset, shape, dtype)
        self._blocks = self.data.view(-1, PAGE * spec.head_dim)
        self._slots = self.data.view(-1, spec.head_dim)
        self._heads = torch.arange(spec.kv_heads, device=device)

    @property
    def pages(self) -> int:
        """The number of pages."""
        return self.data.shape[0]

    def raw(self) -> NDArray[np.uint8]:
        """Return a host's pages as bytes, (pages, layers, bytes of a page's layer), the same memory."""
        flat = self.data.view(torch.uint8).reshape(self.pages, len(self.layers), -1)
        found: NDArray[np.uint8] = flat.numpy()
        return found

    def blocks(self, tables: Tensor) -> Tensor:
        """Return the indices of each head's key block in layer 0, for `read`, of page ids (sequences, L)."""
        first = tables * (len(self.layers) * 2 * self.kv_heads)
        return (first[:, None, :] + self._heads[None, :, None]).reshape(-1)

    def read(self, layer: int, blocks: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Return K and V, (sequences * kv heads, 1, tokens, dim), of a layer, numbered within the group."""
        at = blocks + layer * 2 * self.kv_heads
        dim = self.data.shape[-1]
        keys, values = (
            self._blocks.index_select(0, half).view(-1, PAGE, dim)
            for half in (at, at + self.kv_heads)
        )
        if self.packed:
            keys, values = _unpack_keys(keys), _unpack_values(values)
        shape = (sequences * self.kv_heads, 1, -1, dim)
        return keys.reshape(shape), values.reshape(shape)

    def slots(self, pages: Tensor, offsets: Tensor) -> Tensor:
        """Return the indices for `write` of rows, given their page ids and their offsets in those pages."""
        first = pages * (len(self.layers) * 2 * self.kv_heads)
        heads = torch.arange(self.kv_heads, device=pages.device)
        return ((first[:, None] + heads) * PAGE + offsets[:, None]).reshape(-1)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (rows, kv heads, dim) in a layer, numbered within the group."""
        at, dim = slots + layer * 2 * self.kv_heads * PAGE, keys.shape[-1]
        self._put(at, keys.reshape(-1, dim), values.reshape(-1, dim))

    def clear(self, slots: Tensor) -> None:
        """Set rows to zero in all layers, so that no NaN or infinity stays in the pages."""
        nothing = self.data.new_zeros(len(slots), self.data.shape[-1])
        for layer in range(len(self.layers)):
            self._put(slots + layer * 2 * self.kv_heads * PAGE, nothing, nothing)
        pages = slots.cpu().numpy() // (len(self.layers) * 2 * self.kv_heads * PAGE)
        self.written(np.unique(pages))

    def written(self, pages: Sequence[int] | NDArray[np.int64], layer: int | None = None) -> None:
        """Count a write to one layer (None: all layers) of pages; called after the write, on any thread.

        Rows that attention appends are not counted.
        """
        if self.versions is not None:
            self.versions[pages, slice(None) if layer is None else layer] += 1

    def form(self, layers: Tensor) -> Tensor:
        """Convert layers of pages (…, 2, kv heads, PAGE, dim) from this pool's layout to the packed layout."""
        return layers if self.packed else pack(layers)

    def store(self, page: int, layer: int, packed: Tensor) -> None:
        """Store one layer of a page, (2, kv heads, PAGE, dim), given in the packed layout."""
        there = packed.to(self.data.device, non_blocking=True)
        self.data[page, layer] = there if self.packed else unpack(there)
        self.written([page], layer)

    def _put(self, at: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values (n, dim); `at` are the keys' indices among all rows of `dim` numbers."""
        to = at + self.kv_heads * PAGE
        if not self.packed:
            self._slots.index_copy_(0, at, keys)
            self._slots.index_copy_(0, to, values)
            return
        unit, dim = _unit(self.data), keys.shape[-1]
        by_key = self._blocks.view(-1, dim // unit, PAGE, unit)
        by_key[at // PAGE, :, at % PAGE] = keys.view(-1, dim // unit, unit)
        by_value = self._blocks.view(-1, PAGE // unit, dim, unit)
        by_value[to // PAGE, to % PAGE // unit, :, to % unit] = values


def copy_pages(
    source: PageMemory,
    pages: Sequence[int],
    layer: int,
    target: PageMemory,
    targets: Sequence[int],
    target_layer: int,
) -> None:
    """Copy one layer of pages from one pool to another of the same data type, with any layouts and devices.

    Between devices the copy runs on the current stream, and this function does not wait for it.
    """
    if not pages:
        return
    here, there = source.data.device.type, target.data.device.type
    if here == there == "cpu" and source.packed == target.packed:
        for page, place in zip(pages, targets, strict=True):  # without a copy in between
            target.data[place, target_layer].copy_(source.data[page, layer])
        target.written(list(targets), target_layer)
    else:
        found = read_layer(source, pages, layer, target.data.device)
        store_layer(target, targets, target_layer, found)


def read_layer(
    source: PageMemory, pages: Sequence[int], layer: int, device: torch.device
) -> Tensor:
    """Return one layer of pages, (pages, 2, kv heads, PAGE, dim), in the packed layout.

    The result is on the source's device, or on the destination `device` if the source is on the CPU.
    """
    here = source.data.device
    if here.type != "cpu" or device.type == "cpu":
        return source.form(source.data[_places(pages, here), layer])
    found = torch.empty(
        (len(pages), *source.data.shape[2:]), dtype=source.data.dtype, device=device
    )
    kernels = _pinned_copies(source)
    if kernels is not None:
        kernels.gather(source.data, _places(pages, device), layer, found)
    else:
        for place, page in enumerate(pages):
            found[place].copy_(source.data[page, layer], non_blocking=True)
    return source.form(found)


def store_layer(target: PageMemory, pages: Sequence[int], layer: int, packed: Tensor) -> None:
    """Store one layer of pages, as returned by `read_layer`."""
    found, there = packed if target.packed else unpack(packed), target.data.device
    kernels = _pinned_copies(target) if found.device.type == "cuda" else None
    if found.device.type == there.type:
        target.data[_places(pages, there), layer] = found
    elif kernels is not None:
        kernels.scatter(target.data, _places(pages, found.device), layer, found.contiguous())
    else:
        for place, page in enumerate(pages):
            target.data[page, layer].copy_(found[place], non_blocking=True)
    target.written(list(pages), layer)


def _pinned_copies(host: PageMemory) -> ModuleType | None:
    """Return the kernels that copy many pages between a host's pinned memory and CUDA; None where they cannot."""
    if not host.data.is_pinned():
        return None
    with contextlib.suppress(ImportError):
        from engine.kernels import triton_pages  # noqa: PLC0415 - there on CUDA only

        return triton_pages
    return None


def _places(pages: Sequence[int], device: torch.device) -> list[int] | Tensor:
    """Return page ids as an index tensor that can be used without a wait for the device."""
    if device.type == "cpu":
        return list(pages)
    return torch.tensor(pages).pin_memory().to(device, non_blocking=True)


def pack(pages: Tensor) -> Tensor:
    """Convert layers of pages (…, 2, kv heads, PAGE, dim) to the packed layout, which the compiled kernels read.

    The packed layout stores keys as `[dim][token]` and values as `[token][dim]`. In bf16 two neighbours form one unit,
    since processors multiply pairs: keys are `[dim / 2][token][2]` and values `[token / 2][dim][2]`. The tensor keeps
    the shape of the plain layout.
    """
    unit, dim = _unit(pages), pages.shape[-1]
    keys, values = pages.unbind(-4)
    keys = keys.reshape(*keys.shape[:-1], dim // unit, unit).transpose(-3, -2)
    values = values.reshape(*values.shape[:-2], PAGE // unit, unit, dim).transpose(-2, -1)
    return torch.stack(
        [each.reshape(pages.shape[:-4] + pages.shape[-3:]) for each in (keys, values)], -4
    )


def unpack(pages: Tensor) -> Tensor:
    """Convert layers of pages from the packed to the plain layout, the inverse of `pack`."""
    keys, values = pages.unbind(-4)
    return torch.stack([_unpack_keys(keys), _unpack_values(values)], -4)


def _unpack_keys(blocks: Tensor) -> Tensor:
    unit, dim = _unit(blocks), blocks.shape[-1]
    return blocks.reshape(*blocks.shape[:-2], dim // unit, PAGE, unit).transpose(-3, -2).flatten(-2)


def _unpack_values(blocks: Tensor) -> Tensor:
    unit, dim = _unit(blocks), blocks.shape[-1]
    return (
        blocks.reshape(*blocks.shape[:-2], PAGE // unit, dim, unit)
        .transpose(-2, -1)
        .flatten(-3, -2)
    )


def _unit(pages: Tensor) -> int:
    return 2 if pages.dtype == torch.bfloat16 else 1


def page_bytes(spec: DecoderSpec, layers: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page of a group with `layers` layers."""
    return layers * 2 * spec.kv_heads * PAGE * spec.head_dim * dtype.itemsize


def segment_bytes(spec: DecoderSpec, pages: int, dtype: torch.dtype) -> int:
    """Return the bytes of a segment that holds `pages` pages of each layer group."""
    each = (pages * page_bytes(spec, len(layers), dtype) for _, layers in spec.groups)
    return sum(-(-size // LARGE) * LARGE for size in each)


def page_count(
    spec: DecoderSpec, kv_bytes: int, *, dtype: torch.dtype, device: torch.device
) -> int:
    """Return how many pages each group gets from `kv_bytes` (0: a share of free memory); ConfigError if none.

    The share is 0.4 of the available memory where the device is a CPU, or 0.8 of a device's free memory, but never more
    than 64 sequences of full context need.
    """
    each = sum(page_bytes(spec, len(layers), dtype) for _, layers in spec.groups)
    if kv_bytes:
        if kv_bytes < each:
            raise ConfigError(
                f"SPILLWAY_KV_BYTES is {kv_bytes}; expected 0, or at least {each}: one page of {PAGE} tokens"
            )
        return kv_bytes // each
    wanted = SEQUENCES * -(-spec.positions // PAGE)
    if device.type == "cuda":
        share = int(torch.cuda.mem_get_info(device)[0] * _SHARE_DEVICE)
    else:
        share = int(available_memory() * SHARE_CPU)
    if share < each:
        raise ConfigError(
            f"only {share} bytes are free for KV pages, and one of {PAGE} tokens takes {each}; "
            "expected a smaller model, or SPILLWAY_KV_BYTES"
        )
    return min(wanted, share // each)


def host_page_count(host_bytes: int | None, pages: int, page_size: int) -> int:
    """Return how many pages each group gets from `host_bytes` of host memory, when the device has `pages` pages.

    `host_bytes` None stands for a quarter of the available memory, but at most four times the device's pages.
    """
    if host_bytes is not None:
        return host_bytes // page_size
    share = int(available_memory() * _SHARE_HOST) // page_size
    return min(share, HOST_TIMES * pages)


def available_memory() -> int:
    """Return the bytes that this process can still allocate: the machine's, or its cgroup's if fewer."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _text(_MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used in _CGROUP:
        if _text(limit).isdigit() and _text(used).isdigit():
            cache = _inactive(_text(used.parent / "memory.stat"))
            free = min(free, max(0, int(_text(limit)) - int(_text(used)) + cache))
    return free


def _inactive(statistics: str) -> int:
    """Return the bytes of file cache that a cgroup frees when its processes need memory."""
    fields = dict(line.split()[:2] for line in statistics.splitlines() if line.count(" "))
    return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, touched: int
) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # An anonymous mapping is zero without being touched, and has large pages where the system offers them; torch.zeros
    # would write to all of it. Private: shared memory gets huge pages only if the system is configured so.
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    if touched:
        with contextlib.suppress(OSError):  # Linux before 5.14
            memory.madvise(_MADV_POPULATE_WRITE, 0, min(touched, size))
    return _mapped(memory, 0, shape, dtype)


def _part(
    segment: MemorySegment, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    found = _mapped(segment.memory, offset, shape, dtype)
    if torch.cuda.is_available() and found.numel():
        # The device copies from and to pinned memory while it computes.
        torch.cuda.cudart().cudaHostRegister(found.data_ptr(), found.nbytes, 0)  # type: ignore[no-untyped-call]
    return found


def _mapped(memory: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    plain = np.frombuffer(
        memory,
        dtype=np.float32 if dtype.itemsize == 4 else np.int16,
        count=math.prod(shape),
        offset=offset,
    )
    return torch.from_numpy(plain).view(dtype).view(shape)
