#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <string>

#include "error.hpp"

namespace changeover {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

DriverLibrary::DriverLibrary() {
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = ::dlerror();
    throw DriverMissing(std::string("there is no CUDA driver: ") + (why != nullptr ? why : kLibrary));
  }
  proc_address_ = reinterpret_cast<ProcAddress>(::dlsym(library, "cuGetProcAddress_v2"));
  if (proc_address_ == nullptr) {
    throw DriverMissing("the CUDA driver is older than " + version_text(kOldestDriver));
  }
  error_name_ = reinterpret_cast<ErrorText>(find("cuGetErrorName", kOldestDriver, false));
  error_string_ = reinterpret_cast<ErrorText>(find("cuGetErrorString", kOldestDriver, false));
}

void* DriverLibrary::find(const char* name, int version, bool is_optional) const {
  void* function = nullptr;
  int status = 0;
  const cuda::Result result = proc_address_(name, &function, version, 0, &status);
  if (result == cuda::kSuccess && function != nullptr) return function;
  if (is_optional) return nullptr;
  throw DriverMissing("the CUDA driver is older than " + version_text(version) + ": it has no " + name);
}

void DriverLibrary::fail(const char* call, cuda::Result result) const {
  const char* name = nullptr;
  const char* words = nullptr;
  if (error_name_(result, &name) != cuda::kSuccess || name == nullptr) name = "unknown error";
  if (error_string_(result, &words) != cuda::kSuccess || words == nullptr) words = "the driver has no words for it";
  throw SystemError(call, result, std::string(name) + ": " + words);
}

CudaDriver::CudaDriver() {
  driver_get_version(&version_);
  if (version_ < kOldestDriver) {
    throw DriverMissing("the CUDA driver speaks " + version_text(version_) + ", " + version_text(kOldestDriver) +
                        " is needed");
  }
  init(0);
}

const CudaDriver& CudaDriver::get() {
  static const CudaDriver* const driver = new CudaDriver;
  return *driver;
}

}  // namespace changeover
