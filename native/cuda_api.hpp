// The part of the CUDA driver's binary interface that is used here, so that no toolkit is needed to
// build.  Types and values are those of cuda.h; they are the same in CUDA 12 and 13.
#pragma once

#include <cstddef>
#include <cstdint>

namespace changeover::cuda {

using Result = int;
using Device = int;
using DevicePointer = unsigned long long;
using AllocationHandle = unsigned long long;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotReady = 600;
inline constexpr Result kNotSupported = 801;
inline constexpr Result kStreamCaptureUnsupported = 900;
inline constexpr Result kUnknown = 999;

inline constexpr int kAttributeComputeMajor = 75;
inline constexpr int kAttributeComputeMinor = 76;
inline constexpr int kAttributeVirtualMemory = 102;
inline constexpr int kAttributePosixFd = 103;
inline constexpr int kAttributeHostNumaNode = 134;

struct Uuid {
  unsigned char bytes[16];
};

inline constexpr int kLocationDevice = 1;
struct Location {
  int type;
  int id;
};

inline constexpr int kAllocationPinned = 1;
inline constexpr int kHandlePosixFd = 1;
inline constexpr int kGranularityRecommended = 1;
struct AllocationProperties {
  int type;
  int requested_handle_types;
  Location location;
  void* win32_handle_meta_data;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
static_assert(sizeof(AllocationProperties) == 32);

inline constexpr int kAccessRead = 1;
inline constexpr int kAccessReadWrite = 3;
struct AccessDescription {
  Location location;
  int flags;
};
static_assert(sizeof(AccessDescription) == 12);

struct IpcHandle {
  char reserved[64];
};
inline constexpr unsigned kIpcLazyPeerAccess = 1;

inline constexpr int kSourceAccessInStreamOrder = 1;
inline constexpr unsigned kCopyPrefersOverlap = 1;  // with kernels
struct CopyAttributes {
  int source_access_order;
  Location source_hint;
  Location target_hint;
  unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24);

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kHostAllocPortable = 1;

}  // namespace changeover::cuda
