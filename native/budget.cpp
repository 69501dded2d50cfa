#include "budget.hpp"

#include <limits>
#include <utility>

#include "error.hpp"

namespace changeover {

Reservation& Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    give_back();
    budget_ = std::move(other.budget_);
    slab_id_ = std::move(other.slab_id_);
  }
  return *this;
}

Reservation::~Reservation() { give_back(); }

void Reservation::give_back() noexcept {
  if (budget_) std::exchange(budget_, nullptr)->release(slab_id_);
}

Reservation Budget::reserve(const std::string& slab_id, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  if (const std::uint64_t free = free_locked(); nbytes > free) throw BudgetExceeded(nbytes, free);
  if (!holdings_.try_emplace(slab_id, Holding{nbytes, 1}).second) {
    throw Misuse("slab " + slab_id + " exists already");
  }
  used_bytes_ += nbytes;
  return {shared_from_this(), slab_id};
}

Reservation Budget::adopt(const std::string& slab_id, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto [place, is_new] = holdings_.try_emplace(slab_id, Holding{nbytes, 0});
  if (is_new) used_bytes_ += nbytes;
  ++place->second.holders;
  return {shared_from_this(), slab_id};
}

void Budget::release(const std::string& slab_id) noexcept {
  const std::lock_guard lock(mutex_);
  const auto place = holdings_.find(slab_id);
  if (--place->second.holders == 0) {
    used_bytes_ -= place->second.nbytes;
    holdings_.erase(place);
  }
}

std::uint64_t Budget::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

std::uint64_t Budget::free_bytes() const {
  const std::lock_guard lock(mutex_);
  return free_locked();
}

std::uint64_t Budget::free_locked() const noexcept {
  if (!limit_bytes_) return std::numeric_limits<std::uint64_t>::max() - used_bytes_;
  return *limit_bytes_ > used_bytes_ ? *limit_bytes_ - used_bytes_ : 0;
}

}  // namespace changeover
