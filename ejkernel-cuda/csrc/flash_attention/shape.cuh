// Template shapes, and the layout of shared memory.
#pragma once

#include "hopper.cuh"

namespace ejkernel::flash_attention {

constexpr int kRows = 64;               // queries of a consumer
constexpr int kAtomColumns = 64;        // columns of a swizzle atom
constexpr int kMaxShared = 227 * 1024;  // bytes per block
constexpr int kAlignmentSlack = 1024;   // to align tiles to 1024 bytes

// Heads of SIZE elements, KV tiles of BLOCK_K keys in a pipeline of STAGES stages each for K and V, and CONSUMERS warpgroups
// beside the producer.
template <typename Element, int SIZE, int BLOCK_K, int CONSUMERS, int STAGES>
struct Shape {
  using T = Element;
  static constexpr int kSize = SIZE, kBlockK = BLOCK_K, kConsumers = CONSUMERS, kStages = STAGES;
  static constexpr int kBlockQ = CONSUMERS * kRows, kAtoms = SIZE / kAtomColumns;
  static constexpr int kThreads = (CONSUMERS + 1) * kWarpgroupThreads;
  static constexpr int kConsumerRegisters = CONSUMERS == 2 ? 240 : 160, kProducerRegisters = CONSUMERS == 2 ? 24 : 32;

  static constexpr int kQueryAtomBytes = kRows * kAtomRowBytes, kTileAtomBytes = BLOCK_K * kAtomRowBytes;
  static constexpr int kQueryBytes = kQueryAtomBytes * kAtoms, kTileBytes = kTileAtomBytes * kAtoms;
  static constexpr int kBarriers = 2 * CONSUMERS + 4 * STAGES;
  static constexpr int kSharedWithoutOut = CONSUMERS * kQueryBytes + 2 * STAGES * kTileBytes + 8 * kBarriers + kAlignmentSlack;
  // A consumer's output has its own buffer, or reuses that of its queries; then the next queries wait for the TMA store.
  static constexpr bool kSeparateOut = kSharedWithoutOut + CONSUMERS * kQueryBytes <= kMaxShared;
  static constexpr int kShared = kSharedWithoutOut + (kSeparateOut ? CONSUMERS * kQueryBytes : 0);

  static_assert(SIZE % kAtomColumns == 0 && BLOCK_K % 16 == 0 && BLOCK_K <= 256 && (STAGES & (STAGES - 1)) == 0);
  static_assert(kQueryAtomBytes % 1024 == 0 && kTileAtomBytes % 1024 == 0 && kShared <= kMaxShared);
};

#ifdef EJKERNEL_HOPPER
// Shared memory of a block. A `full` mbarrier completes when its tile has arrived, an `empty` one when all readers have
// released it.
template <class S>
struct SharedStorage {
  unsigned char* begin;  // aligned to 1024 bytes

  EJKERNEL_INLINE explicit SharedStorage(unsigned char* memory) : begin(memory + (-shared_address(memory) & 1023)) {}

  EJKERNEL_INLINE unsigned char* query(int consumer) const { return begin + consumer * S::kQueryBytes; }
  EJKERNEL_INLINE unsigned char* key(int stage) const { return begin + S::kConsumers * S::kQueryBytes + stage * S::kTileBytes; }
  EJKERNEL_INLINE unsigned char* value(int stage) const { return key(S::kStages + stage); }
  EJKERNEL_INLINE unsigned char* out(int consumer) const {
    return S::kSeparateOut ? key(2 * S::kStages) + consumer * S::kQueryBytes : query(consumer);
  }
  EJKERNEL_INLINE Mbarrier* barriers() const {
    return reinterpret_cast<Mbarrier*>(key(2 * S::kStages) + (S::kSeparateOut ? S::kConsumers * S::kQueryBytes : 0));
  }
  EJKERNEL_INLINE Mbarrier* query_full(int consumer) const { return barriers() + consumer; }
  EJKERNEL_INLINE Mbarrier* query_empty(int consumer) const { return barriers() + S::kConsumers + consumer; }
  EJKERNEL_INLINE Mbarrier* key_full(int stage) const { return barriers() + 2 * S::kConsumers + stage; }
  EJKERNEL_INLINE Mbarrier* key_empty(int stage) const { return key_full(S::kStages + stage); }
  EJKERNEL_INLINE Mbarrier* value_full(int stage) const { return key_full(2 * S::kStages + stage); }
  EJKERNEL_INLINE Mbarrier* value_empty(int stage) const { return key_full(3 * S::kStages + stage); }

  // All threads of the block call this.
  EJKERNEL_INLINE void init_barriers() const {
    constexpr int kWarps = S::kConsumers * kWarpgroupThreads / 32;
    if (threadIdx.x == 0) {
      for (int i = 0; i < S::kConsumers; ++i) {
        mbarrier_init(query_full(i), 1);
        mbarrier_init(query_empty(i), S::kSeparateOut ? kWarpgroupThreads / 32 : 1);
      }
      for (int i = 0; i < S::kStages; ++i) {
        mbarrier_init(key_full(i), 1);
        mbarrier_init(key_empty(i), kWarps);
        mbarrier_init(value_full(i), 1);
        mbarrier_init(value_empty(i), kWarps);
      }
      fence_mbarrier_init();
    }
    __syncthreads();
  }
};

// Pipeline stage and phase parity of the `count`-th tile.
template <class S>
EJKERNEL_INLINE int stage_of(int count) {
  return count & (S::kStages - 1);
}
template <class S>
EJKERNEL_INLINE unsigned parity_of(int count) {
  return unsigned(count / S::kStages) & 1;
}
#endif

}  // namespace ejkernel::flash_attention
