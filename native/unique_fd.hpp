// `UniqueFd`: the one owner of a file descriptor.
#pragma once

#include <unistd.h>

#include <utility>

namespace changeover {

class UniqueFd {
 public:
  UniqueFd() noexcept = default;
  explicit UniqueFd(int take_fd) noexcept : fd_(take_fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  int borrow() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

  void reset() noexcept {
    // On Linux the descriptor is gone whatever close() answers, so EINTR must not be retried.
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace changeover
