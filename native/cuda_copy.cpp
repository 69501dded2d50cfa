#include "cuda_copy.hpp"

#include <string>
#include <utility>

#include "cuda_driver.hpp"
#include "error.hpp"

namespace changeover {

std::unique_ptr<CudaCopy> CudaCopy::begin(std::shared_ptr<const CudaRegion> source,
                                          std::shared_ptr<const CudaRegion> target) {
  if (source->nbytes() != target->nbytes()) {
    throw Misuse("a copy of " + std::to_string(source->nbytes()) + " bytes into " +
                 std::to_string(target->nbytes()));
  }
  const ContextScope scope(target->device());
  return std::unique_ptr<CudaCopy>(new CudaCopy(std::move(source), std::move(target)));
}

CudaCopy::CudaCopy(std::shared_ptr<const CudaRegion> source, std::shared_ptr<const CudaRegion> target)
    : source_(std::move(source)), target_(std::move(target)), stream_(target_->device().least_priority()) {
  const CudaDriver& driver = CudaDriver::get();
  const auto from = readable_source();
  // Last, so that nothing is under way where a step before it throws.
  if (from) {
    driver.copy_on_device(target_->address(), *from, target_->nbytes(), stream_.borrow());
  } else {
    driver.copy_between(target_->address(), target_->device().context(), source_->address(),
                        source_->device().context(), target_->nbytes(), stream_.borrow());
  }
}

CudaCopy::~CudaCopy() {
  try {
    const ContextScope scope(target_->device());
    static_cast<void>(CudaDriver::get().stream_synchronize.attempt(stream_.borrow()));
  } catch (const SystemError&) {
    // The context is lost, and with it the copy.
  }
}

void CudaCopy::wait() const {
  const ContextScope scope(target_->device());
  stream_.synchronize();
}

std::optional<cuda::DevicePointer> CudaCopy::readable_source() {
  CudaDevice& reader = target_->device();
  if (&reader == &source_->device()) return source_->address();
  const CudaAllocation* const allocation = source_->allocation();
  if (allocation == nullptr || !reader.can_reach(source_->device())) return std::nullopt;
  addresses_.emplace(reader, source_->nbytes());
  mapping_.emplace(addresses_->address(), source_->nbytes(), *allocation);
  set_access(reader, mapping_->address(), source_->nbytes(), Access::read_only);
  return mapping_->address();
}

}  // namespace changeover
