// What the native core can fail with.  The binding turns each class into its Python counterpart
// from `shared.errors`; nothing is told apart by its text.
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace changeover {

// A system call failed (number is errno), or a file ended early (number is 0).
class SystemError : public std::exception {
 public:
  SystemError(std::string call, int number)
      : SystemError(std::move(call), number, std::generic_category().message(number)) {}

  SystemError(std::string call, int number, std::string detail)
      : call_(std::move(call)), number_(number), detail_(std::move(detail)) {}

  const std::string& call() const noexcept { return call_; }
  int number() const noexcept { return number_; }
  const std::string& detail() const noexcept { return detail_; }
  const char* what() const noexcept override { return detail_.c_str(); }

 private:
  std::string call_;
  int number_;
  std::string detail_;
};

// A file could not be read at a byte.
class ReadError : public SystemError {
 public:
  ReadError(std::string call, int number, std::uint64_t file_offset)
      : SystemError(std::move(call), number), file_offset_(file_offset) {}

  static ReadError ends_early(std::string call, std::uint64_t file_offset, std::uint64_t missing_bytes) {
    return {std::move(call),
            "the file ends at byte " + std::to_string(file_offset) + ", at least " +
                std::to_string(missing_bytes) + " more were expected",
            file_offset};
  }

  std::uint64_t file_offset() const noexcept { return file_offset_; }

 private:
  ReadError(std::string call, std::string detail, std::uint64_t file_offset)
      : SystemError(std::move(call), 0, std::move(detail)), file_offset_(file_offset) {}

  std::uint64_t file_offset_;
};

// A budget has no room for what was asked.
class BudgetExceeded : public std::exception {
 public:
  BudgetExceeded(std::uint64_t needed_bytes, std::uint64_t free_bytes)
      : needed_bytes_(needed_bytes), free_bytes_(free_bytes) {}

  std::uint64_t needed_bytes() const noexcept { return needed_bytes_; }
  std::uint64_t free_bytes() const noexcept { return free_bytes_; }
  const char* what() const noexcept override { return "over the memory limit"; }

 private:
  std::uint64_t needed_bytes_;
  std::uint64_t free_bytes_;
};

// A device has no room for what was asked.
class DeviceMemoryExceeded : public std::exception {
 public:
  DeviceMemoryExceeded(std::string what, std::uint64_t needed_bytes, std::uint64_t free_bytes)
      : what_(std::move(what)), needed_bytes_(needed_bytes), free_bytes_(free_bytes) {}

  std::uint64_t needed_bytes() const noexcept { return needed_bytes_; }
  std::uint64_t free_bytes() const noexcept { return free_bytes_; }
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
  std::uint64_t needed_bytes_;
  std::uint64_t free_bytes_;
};

// A library of the machine, such as its GPU driver, is not there or too old.
class DriverMissing : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A peer sent something that is not what it should be.
class ForeignHandle : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// This program broke a rule of the interface it called.
class Misuse : public std::logic_error {
  using std::logic_error::logic_error;
};

}  // namespace changeover
