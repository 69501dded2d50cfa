// `CudaDriver`: the installed CUDA driver, found when it is first needed.
//
// Every entry point is a `DriverCall`: calling it throws SystemError with the call's name, the
// driver's code and the driver's words for it.  `attempt` answers the code instead, for the few
// callers that tell codes apart or that must not throw.
#pragma once

#include <cstddef>

#include "cuda_api.hpp"

namespace changeover {

// What this project needs: POSIX fds for memory (11.2) and the entry points by name (12.0).
inline constexpr int kOldestDriver = 12000;

class DriverLibrary {
 public:
  DriverLibrary();
  DriverLibrary(const DriverLibrary&) = delete;
  DriverLibrary& operator=(const DriverLibrary&) = delete;
  ~DriverLibrary() = default;  // never unloaded: see CudaDriver::get

  // The entry point as of driver interface `version`; null where it is missing and `is_optional`.
  void* find(const char* name, int version, bool is_optional) const;
  // "CUDA_ERROR_…: words"
  [[noreturn]] void fail(const char* call, cuda::Result result) const;

 private:
  using ProcAddress = cuda::Result (*)(const char*, void**, int, unsigned long long, int*);
  using ErrorText = cuda::Result (*)(cuda::Result, const char**);

  ProcAddress proc_address_ = nullptr;
  ErrorText error_name_ = nullptr;
  ErrorText error_string_ = nullptr;
};

template <typename... Arguments>
class DriverCall {
 public:
  DriverCall(const DriverLibrary& library, const char* name, int version = kOldestDriver,
             bool is_optional = false)
      : library_(library),
        name_(name),
        function_(reinterpret_cast<Function>(library.find(name, version, is_optional))) {}

  explicit operator bool() const noexcept { return function_ != nullptr; }

  void operator()(Arguments... arguments) const {
    if (const cuda::Result result = function_(arguments...); result != cuda::kSuccess) {
      library_.fail(name_, result);
    }
  }
  [[nodiscard]] cuda::Result attempt(Arguments... arguments) const noexcept { return function_(arguments...); }
  [[noreturn]] void fail(cuda::Result result) const { library_.fail(name_, result); }

 private:
  using Function = cuda::Result (*)(Arguments...);

  const DriverLibrary& library_;
  const char* name_;
  Function function_;
};

class CudaDriver {
 public:
  // The process's driver, initialised.  Throws DriverMissing where there is none or it is too old.
  // It is never destroyed: threads and tensors may outlive every destructor of a process that ends.
  static const CudaDriver& get();

  int version() const noexcept { return version_; }

 private:
  using Size = std::size_t;
  using Flags = unsigned long long;
  using Pointer = cuda::DevicePointer;

  CudaDriver();
  DriverLibrary library_;  // declared first: the calls below are found in it
  int version_ = 0;

 public:
  const DriverCall<unsigned> init{library_, "cuInit"};
  const DriverCall<int*> driver_get_version{library_, "cuDriverGetVersion"};

  const DriverCall<int*> device_get_count{library_, "cuDeviceGetCount"};
  const DriverCall<cuda::Device*, int> device_get{library_, "cuDeviceGet"};
  const DriverCall<cuda::Uuid*, cuda::Device> device_get_uuid{library_, "cuDeviceGetUuid"};
  const DriverCall<int*, int, cuda::Device> device_get_attribute{library_, "cuDeviceGetAttribute"};
  const DriverCall<int*, cuda::Device, cuda::Device> device_can_access_peer{library_, "cuDeviceCanAccessPeer"};

  const DriverCall<cuda::Context*, cuda::Device> primary_context_retain{library_, "cuDevicePrimaryCtxRetain"};
  const DriverCall<cuda::Context> context_push{library_, "cuCtxPushCurrent"};
  const DriverCall<cuda::Context*> context_pop{library_, "cuCtxPopCurrent"};
  const DriverCall<> context_synchronize{library_, "cuCtxSynchronize"};
  const DriverCall<int*, int*> stream_priority_range{library_, "cuCtxGetStreamPriorityRange"};
  // Since 12.5; without it a release waits for the whole context.
  const DriverCall<cuda::Context, cuda::Event> context_record_event{library_, "cuCtxRecordEvent", 12050, true};

  const DriverCall<Size*, Size*> mem_get_info{library_, "cuMemGetInfo"};
  const DriverCall<cuda::AllocationHandle*, Size, const cuda::AllocationProperties*, Flags> mem_create{
      library_, "cuMemCreate"};
  const DriverCall<cuda::AllocationHandle> mem_release{library_, "cuMemRelease"};
  const DriverCall<Size*, const cuda::AllocationProperties*, int> mem_get_granularity{
      library_, "cuMemGetAllocationGranularity"};
  const DriverCall<cuda::AllocationProperties*, cuda::AllocationHandle> mem_get_properties{
      library_, "cuMemGetAllocationPropertiesFromHandle"};
  const DriverCall<void*, cuda::AllocationHandle, int, Flags> mem_export{library_,
                                                                         "cuMemExportToShareableHandle"};
  const DriverCall<cuda::AllocationHandle*, void*, int> mem_import{library_, "cuMemImportFromShareableHandle"};
  const DriverCall<Pointer*, Size, Size, Pointer, Flags> address_reserve{library_, "cuMemAddressReserve"};
  const DriverCall<Pointer, Size> address_free{library_, "cuMemAddressFree"};
  const DriverCall<Pointer, Size, Size, cuda::AllocationHandle, Flags> mem_map{library_, "cuMemMap"};
  const DriverCall<Pointer, Size> mem_unmap{library_, "cuMemUnmap"};
  const DriverCall<Pointer, Size, const cuda::AccessDescription*, Size> mem_set_access{library_,
                                                                                       "cuMemSetAccess"};

  const DriverCall<Pointer*, Size> mem_alloc{library_, "cuMemAlloc"};
  const DriverCall<Pointer> mem_free{library_, "cuMemFree"};
  const DriverCall<Pointer*, Size*, Pointer> mem_get_range{library_, "cuMemGetAddressRange"};
  const DriverCall<cuda::IpcHandle*, Pointer> ipc_get_handle{library_, "cuIpcGetMemHandle"};
  const DriverCall<Pointer*, cuda::IpcHandle, unsigned> ipc_open_handle{library_, "cuIpcOpenMemHandle"};
  const DriverCall<Pointer> ipc_close_handle{library_, "cuIpcCloseMemHandle"};

  const DriverCall<void**, Size, unsigned> host_alloc{library_, "cuMemHostAlloc"};
  const DriverCall<void*> host_free{library_, "cuMemFreeHost"};
  const DriverCall<Pointer, const void*, Size, cuda::Stream> copy_to_device{library_, "cuMemcpyHtoDAsync"};
  // Since 12.8; this form of it since 13.0.
  const DriverCall<Pointer*, Pointer*, Size*, Size, cuda::CopyAttributes*, Size*, Size, cuda::Stream> copy_batch{
      library_, "cuMemcpyBatchAsync", 13000, true};
  const DriverCall<Pointer, Pointer, Size, cuda::Stream> copy_on_device{library_, "cuMemcpyDtoDAsync"};
  const DriverCall<Pointer, cuda::Context, Pointer, cuda::Context, Size, cuda::Stream> copy_between{
      library_, "cuMemcpyPeerAsync"};
  const DriverCall<Pointer, unsigned char, Size> mem_set{library_, "cuMemsetD8"};

  const DriverCall<cuda::Stream*, unsigned, int> stream_create{library_, "cuStreamCreateWithPriority"};
  const DriverCall<cuda::Stream> stream_destroy{library_, "cuStreamDestroy"};
  const DriverCall<cuda::Stream> stream_synchronize{library_, "cuStreamSynchronize"};
  const DriverCall<cuda::Event*, unsigned> event_create{library_, "cuEventCreate"};
  const DriverCall<cuda::Event> event_destroy{library_, "cuEventDestroy"};
  const DriverCall<cuda::Event, cuda::Stream> event_record{library_, "cuEventRecord"};
  const DriverCall<cuda::Event> event_query{library_, "cuEventQuery"};
  const DriverCall<cuda::Event> event_synchronize{library_, "cuEventSynchronize"};

  const DriverCall<cuda::Module*, const void*> module_load{library_, "cuModuleLoadData"};
  const DriverCall<cuda::Module> module_unload{library_, "cuModuleUnload"};
  const DriverCall<cuda::Function*, cuda::Module, const char*> module_get_function{library_,
                                                                                   "cuModuleGetFunction"};
  const DriverCall<cuda::Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   cuda::Stream, void**, void**>
      launch{library_, "cuLaunchKernel"};
};

}  // namespace changeover
