// Compiling kernels at run time, with NVRTC as it comes with torch or a CUDA installation.
#pragma once

#include <string>
#include <vector>

namespace changeover {

// A loadable image of `source` (CUDA C++, no headers) for a device of `compute_capability`
// (`major * 10 + minor`): machine code, or PTX where this NVRTC does not know the device.  Tries
// `libraries` in turn; throws DriverMissing where none can be opened, SystemError where it does not
// compile.
std::string compile_kernels(const std::vector<std::string>& libraries, const char* source, const char* name,
                            int compute_capability);

}  // namespace changeover
