"""The native core: checksums, digests, host and CUDA slabs, and the version slot.

Errors are those of `shared.errors`: InvariantError for misuse (a range outside a slab, use after
close, a release that was not acquired), DriverError for a failed system call or one of the CUDA
driver, DriverMissing where a `cuda_…` function finds no driver.
"""

from typing import ClassVar, final

from typing_extensions import Buffer

def crc32(data: Buffer, value: int = 0, *, isa: str | None = None) -> int:
    """IEEE CRC32 as zlib.  Without the GIL.  `isa` picks one of `crc32_isas()`, else ValueError."""

def crc32_combine(first: int, second: int, second_nbytes: int) -> int:
    """CRC32 of two pieces put together, from their CRC32s and the length of the second."""

def sha256(data: Buffer, *, isa: str | None = None) -> bytes:
    """SHA-256.  Without the GIL.  `isa` picks one of `sha256_isas()`, else ValueError."""

def sha256_leaves(data: Buffer, leaf_bytes: int, *, isa: str | None = None) -> bytes:
    """SHA-256 of each leaf, 32 bytes per leaf; the last may be short, none for no data."""

def crc32_isas() -> list[str]:
    """What CRC32 can run on here, slowest first."""

def sha256_isas() -> list[str]:
    """What SHA-256 can run on here, slowest first."""

@final
class Budget:
    """Counts the memory that slabs take in this process; each slab once."""

    def __init__(self, limit_bytes: int | None = None) -> None: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def free_bytes(self) -> int:
        """What a new slab may take; 2**64 - 1 - used without a limit."""

@final
class DlpackCapsule:
    """A one-dimensional uint8 DLPack tensor that was not consumed yet."""

@final
class HostSlab:
    """A sealed memfd, mapped read-only."""

    @property
    def nbytes(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    def borrow_fd(self) -> int: ...
    def crc32(self, offset_bytes: int, nbytes: int) -> int:
        """Without the GIL."""

    def sha256_leaves_of(self, ranges: list[tuple[int, int]], leaf_bytes: int, spread_ns: int = 0) -> bytes:
        """Those of all ranges (offset, bytes), one after the other; `spread_ns` means nothing here.  Without
        the GIL."""

    def digests_of(
        self, ranges: list[tuple[int, int]], leaf_bytes: int, spread_ns: int = 0
    ) -> tuple[list[int], bytes]:
        """The CRC32 of each range, and all leaves; each byte is read once.  Without the GIL."""

    def view(self, offset_bytes: int, nbytes: int) -> DlpackCapsule:
        """The bytes themselves; keeps the mapping alive."""

    def close(self) -> None: ...

@final
class WritableHostSlab:
    """A memfd that this process fills."""

    @property
    def missing_bytes(self) -> int:
        """Bytes that have no pages yet."""

    @property
    def nbytes(self) -> int: ...
    @property
    def is_open(self) -> bool:
        """Neither sealed nor closed."""

    def read_file(self, borrow_fd: int, file_offset: int, offset_bytes: int, nbytes: int) -> int:
        """Read from a file into the slab; CRC32 of the bytes read.  Without the GIL."""

    def read_pieces(self, borrow_fd: int, file_offset: int, pieces: list[tuple[int, int]]) -> list[int]:
        """Read consecutive bytes of a file into several places (offset, bytes); the CRC32 of each.  Without
        the GIL."""

    def seal(self) -> HostSlab: ...
    def close(self) -> None: ...

def create_host_slab(budget: Budget, slab_id: str, nbytes: int) -> WritableHostSlab:
    """A slab without pages yet.  OutOfMemory over the budget; DriverError from the kernel."""

def import_host_slab(budget: Budget, slab_id: str, nbytes: int, take_fd: int) -> HostSlab:
    """Map a received slab; ProtocolError if it is none.  Consumes the fd on every path."""

def cuda_driver_version() -> int:
    """As cuDriverGetVersion: 13000 for 13.0."""

def cuda_devices() -> list[str]:
    """Full UUIDs of the devices this process sees."""

def cuda_device_ordinal(uuid: str) -> int:
    """torch's index of a device, in this process."""

def cuda_has_posix_fds(uuid: str) -> bool:
    """Whether the device's memory can be sent as fds."""

def cuda_numa_node(uuid: str) -> int:
    """The host's NUMA node nearest to a device; -1 where it is not known."""

def cuda_granularity(uuid: str) -> int:
    """Sizes of slabs are multiples of this."""

def cuda_memory(uuid: str) -> tuple[int, int]:
    """Free and total bytes, after what is being released.  Without the GIL."""

def cuda_set_nvrtc_libraries(paths: list[str]) -> None:
    """Where to look for NVRTC, best first."""

@final
class CudaReleaseHold:
    """No memory of a device is unmapped in the background until `close`; native/cuda_release.hpp.  Waits,
    without the GIL, for what is being unmapped."""

    def __init__(self, uuid: str) -> None: ...
    def close(self) -> None: ...

@final
class CudaStaging:
    """Pinned slots between files and a device; native/cuda_staging.hpp."""

    def __init__(self, uuid: str, slot_bytes: int, slots_per_lane: int) -> None: ...

@final
class CudaReserve:
    """Device memory kept from everyone, in pieces; native/cuda_reserve.hpp."""

    def __init__(self, uuid: str, piece_bytes: int) -> None: ...
    def resize(self, pieces: int) -> int:
        """Hold so many pieces, or as many as there is memory for; how many.  Without the GIL."""

    @property
    def pieces(self) -> int: ...

@final
class CudaSlab:
    """Device memory, readable."""

    @property
    def nbytes(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    def borrow_fd(self) -> int: ...
    def crc32(self, offset_bytes: int, nbytes: int) -> int:
        """By a kernel.  Without the GIL."""

    def sha256_leaves_of(self, ranges: list[tuple[int, int]], leaf_bytes: int, spread_ns: int = 0) -> bytes:
        """Those of all ranges (offset, bytes), one after the other, in one go, or in short launches spread
        over `spread_ns` (at most a minute).  Without the GIL."""

    def digests_of(
        self, ranges: list[tuple[int, int]], leaf_bytes: int, spread_ns: int = 0
    ) -> tuple[list[int], bytes]:
        """The CRC32 of each range, and all leaves, computed side by side; `spread_ns` as above."""

    def view(self, offset_bytes: int, nbytes: int) -> DlpackCapsule:
        """The bytes themselves; keeps the mapping alive."""

    def close(self) -> None:
        """Without the GIL."""

@final
class WritableCudaSlab:
    """Device memory that this process fills."""

    @property
    def nbytes(self) -> int: ...
    @property
    def is_open(self) -> bool:
        """Neither sealed nor closed."""

    def read_file(self, borrow_fd: int, file_offset: int, offset_bytes: int, nbytes: int) -> int:
        """Read from a file into the slab; CRC32 of the bytes read.  Without the GIL."""

    def read_pieces(self, borrow_fd: int, file_offset: int, pieces: list[tuple[int, int]]) -> list[int]:
        """Read consecutive bytes of a file into several places (offset, bytes); the CRC32 of each.  Without
        the GIL."""

    def copy_from(self, source: CudaSlab) -> None:
        """Fill all of it from a slab of the same size, of any device.  Without the GIL."""

    def seal(self) -> CudaSlab: ...
    def close(self) -> None: ...

def create_cuda_slab(
    budget: Budget, staging: CudaStaging, slab_id: str, nbytes: int, is_legacy_ipc: bool
) -> WritableCudaSlab:
    """Allocate a slab on the staging's device.  OutOfMemory over the budget or the device."""

def import_cuda_slab(budget: Budget, uuid: str, slab_id: str, nbytes: int, take_fd: int) -> CudaSlab:
    """Map a received slab; ProtocolError if it is none.  Consumes the fd on every path."""

@final
class RemappedRegion:
    """Device addresses that stay while slabs are exchanged; native/remapped_region.hpp."""

    def __init__(self, uuid: str, nbytes: int) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def is_open(self) -> bool: ...
    def exchange(self, slabs: list[CudaSlab]) -> None:
        """Without the GIL."""

    def view(self, offset_bytes: int, nbytes: int) -> DlpackCapsule: ...
    def close(self) -> None: ...

@final
class VersionSlot:
    """The double buffer's reference counts; see native/version_slot.hpp.  Thread-safe, never waits."""

    SLOTS: ClassVar[int]

    def __init__(self) -> None: ...
    def acquire(self) -> int | None:
        """Take a reference on the current slot; None if there is none."""

    def try_acquire(self, slot: int) -> bool:
        """Take a reference on this slot, current or retained; False if it is closed."""

    def release(self, slot: int) -> None:
        """Give back one reference."""

    def publish(self, slot: int) -> None:
        """Make an open slot current; the one before it is retained."""

    def retract(self) -> None:
        """Make no slot current."""

    def close(self, slot: int) -> None:
        """Refuse new references on a retained slot."""

    def open(self, slot: int) -> None:
        """Admit references on a drained slot that was filled again (all slots start drained)."""

    def reopen(self, slot: int) -> None:
        """Take `close` back; the contents are unchanged, references may be out."""

    def is_drained(self, slot: int) -> bool:
        """Closed, and no reference left."""

    def references(self, slot: int) -> int:
        """References that are out, for status."""

    def current(self) -> int | None:
        """The current slot, for status."""
