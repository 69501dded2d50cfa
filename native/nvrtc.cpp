#include "nvrtc.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <system_error>

#include "error.hpp"

namespace changeover {
namespace {

using Result = int;
using Program = struct ProgramTag*;

// NVRTC opens this part of itself by its bare name, which is found in a wheel's folder only if it is
// open already.
void open_builtins_beside(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (folder.empty()) return;
  std::error_code failure;  // a folder that cannot be listed shows when NVRTC is opened
  for (const auto& entry : std::filesystem::directory_iterator(folder, failure)) {
    if (entry.path().filename().string().starts_with("libnvrtc-builtins.so")) {
      ::dlopen(entry.path().c_str(), RTLD_NOW | RTLD_LOCAL);
    }
  }
}

class Nvrtc {
 public:
  explicit Nvrtc(const std::vector<std::string>& libraries) {
    std::string tried;
    for (const std::string& path : libraries) {
      open_builtins_beside(path);
      library_ = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
      if (library_ != nullptr) break;
      const char* why = ::dlerror();
      tried += std::string("; ") + (why != nullptr ? why : path.c_str());
    }
    if (library_ == nullptr) throw DriverMissing("there is no NVRTC to compile kernels with" + tried);
    load(error_string, "nvrtcGetErrorString");
    load(create, "nvrtcCreateProgram");
    load(destroy, "nvrtcDestroyProgram");
    load(compile, "nvrtcCompileProgram");
    load(log_size, "nvrtcGetProgramLogSize");
    load(log, "nvrtcGetProgramLog");
    load(code_size, "nvrtcGetCUBINSize");
    load(code, "nvrtcGetCUBIN");
    load(ptx_size, "nvrtcGetPTXSize");
    load(ptx, "nvrtcGetPTX");
    load(arch_count, "nvrtcGetNumSupportedArchs");
    load(archs, "nvrtcGetSupportedArchs");
  }
  // The library stays loaded: another device may need it again, and torch may use it.

  void check(Result result, const char* call) const {
    if (result != 0) throw SystemError(call, result, error_string(result));
  }

  const char* (*error_string)(Result) = nullptr;
  Result (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*) = nullptr;
  Result (*destroy)(Program*) = nullptr;
  Result (*compile)(Program, int, const char* const*) = nullptr;
  Result (*log_size)(Program, std::size_t*) = nullptr;
  Result (*log)(Program, char*) = nullptr;
  Result (*code_size)(Program, std::size_t*) = nullptr;
  Result (*code)(Program, char*) = nullptr;
  Result (*ptx_size)(Program, std::size_t*) = nullptr;
  Result (*ptx)(Program, char*) = nullptr;
  Result (*arch_count)(int*) = nullptr;
  Result (*archs)(int*) = nullptr;

 private:
  template <typename Function>
  void load(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library_, name));
    if (function == nullptr) throw DriverMissing(std::string("the NVRTC found is too old: it has no ") + name);
  }

  void* library_ = nullptr;
};

class ProgramOwner {
 public:
  ProgramOwner(const Nvrtc& nvrtc, const char* source, const char* name) : nvrtc_(nvrtc) {
    nvrtc.check(nvrtc.create(&program_, source, name, 0, nullptr, nullptr), "nvrtcCreateProgram");
  }
  ProgramOwner(const ProgramOwner&) = delete;
  ProgramOwner& operator=(const ProgramOwner&) = delete;
  ~ProgramOwner() { nvrtc_.destroy(&program_); }
  Program borrow() const noexcept { return program_; }

 private:
  const Nvrtc& nvrtc_;
  Program program_ = nullptr;
};

// The newest architecture that this NVRTC knows and the device can run.
int best_arch(const Nvrtc& nvrtc, int compute_capability) {
  int count = 0;
  nvrtc.check(nvrtc.arch_count(&count), "nvrtcGetNumSupportedArchs");
  std::vector<int> archs(static_cast<std::size_t>(count));
  nvrtc.check(nvrtc.archs(archs.data()), "nvrtcGetSupportedArchs");
  int best = 0;
  for (const int arch : archs) {
    if (arch <= compute_capability) best = std::max(best, arch);
  }
  if (best == 0) {
    throw DriverMissing("the NVRTC found no longer compiles for compute capability " +
                        std::to_string(compute_capability));
  }
  return best;
}

}  // namespace

std::string compile_kernels(const std::vector<std::string>& libraries, const char* source, const char* name,
                            int compute_capability) {
  const Nvrtc nvrtc(libraries);
  const int arch = best_arch(nvrtc, compute_capability);
  const bool is_machine_code = arch == compute_capability;
  const std::string target =
      std::string("--gpu-architecture=") + (is_machine_code ? "sm_" : "compute_") + std::to_string(arch);
  const char* const options[] = {target.c_str(), "--std=c++17"};

  const ProgramOwner program(nvrtc, source, name);
  if (const Result result = nvrtc.compile(program.borrow(), 2, options); result != 0) {
    std::size_t size = 0;
    nvrtc.check(nvrtc.log_size(program.borrow(), &size), "nvrtcGetProgramLogSize");
    std::string log(size, '\0');
    nvrtc.check(nvrtc.log(program.borrow(), log.data()), "nvrtcGetProgramLog");
    throw SystemError("nvrtcCompileProgram", result, log.c_str());
  }
  std::size_t size = 0;
  nvrtc.check((is_machine_code ? nvrtc.code_size : nvrtc.ptx_size)(program.borrow(), &size), "nvrtcGetCUBINSize");
  std::string image(size, '\0');
  nvrtc.check((is_machine_code ? nvrtc.code : nvrtc.ptx)(program.borrow(), image.data()), "nvrtcGetCUBIN");
  return image;
}

}  // namespace changeover
