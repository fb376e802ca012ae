// The same attention where the tensor memory accelerator copies keys and values: pages of one-byte heads of 128, and up to 8
// query heads over each.
//
// One more warp copies steps for all others into a ring that they share, and runs ahead of them from tile to tile: no thread
// that multiplies begins copies or waits for another before a tile is done. Rows are of a key head of a token, heads of a token
// one after the other; their chunks of 16 bytes are swizzled by the number of the row.
#pragma once

#include <array>

#include "axis.h"
#include "hopper.cuh"
#include "paged_attention/sums.cuh"

namespace ejkernel::paged_attention {

constexpr int kBoxThreads = kThreads + 32;
constexpr int kBoxRegisters = 136;                 // beside two blocks there is room for one of the merge
constexpr int kHeadBytes = 128, kBoxAlign = 1024;  // of a key head of a token; where boxes begin, so that all swizzle alike
constexpr int kStepKeys = keys_of_step(1, kHeadBytes);
constexpr int kSideBytes = kWarps * kStepKeys * kHeadBytes;  // of keys, and of values, of a step of all warps
constexpr int kLeastOfBox = 8;                               // tokens at least; at most kStepKeys

// How pages are copied.
struct Boxes {
  RowMap key, value;
  int tokens;  // of a box
};

// Whether a page's tokens of one head lie closer than its heads; then a box has one head.
EJKERNEL_BOTH constexpr bool heads_apart(const Side& side) { return side.head > side.token; }

// Tokens of a box: as many as a step of a warp has and pages are multiples of; less than kLeastOfBox have none.
constexpr int tokens_of_box(int64_t page_size) {
  int tokens = kStepKeys;
  while (tokens > 1 && page_size % tokens) tokens /= 2;
  return tokens;
}

// The axes of a side: rows, heads and tokens, or tokens and heads where tokens of a head lie closer, pages, batch.
inline std::array<Axis, 5> axes_of(const Problem& problem, const Side& side) {
  const Requests& all = problem.requests;
  const Axis head{problem.heads / problem.group, problem.together, side.head};
  const Axis token{all.page_size, tokens_of_box(all.page_size), side.token};
  const bool apart = heads_apart(side), own = side.batch > 0;  // own: members have pages of their own
  return {Axis{kHeadBytes / 8, kHeadBytes / 8, 8}, apart ? token : head, apart ? head : token, Axis{all.pages, 1, side.page},
          Axis{own ? problem.batch : 1, 1, own ? side.batch : all.pages * side.page}};
}

// Barriers of the ring, behind its slots and the notes.
struct Ring {
  Arrivals full[kMaxStages], empty[kMaxStages];
};

constexpr int64_t boxes_shared_bytes(int stages) {
  return int64_t(stages) * 2 * kSideBytes + int64_t(sizeof(Ring) + sizeof(Notes)) + kBoxAlign;
}

// Keys and values as boxes leave them, and how products take them without moving a byte between lanes: any channel may be any
// term of a product of keys, and any channel of values any row, as long as queries and results agree. A lane reads 16 bytes of
// a row, eight lanes at a time: of two keys four chunks each, which lie in different banks; of four tokens two chunks of
// values, of which two meet in a bank where a block has more than one key head.
template <typename S_>
struct BoxTile {
  using T = __half;
  using S = S_;
  using Words = Pack<uint32_t, 4>;
  static constexpr int kChannels = kHeadBytes, kKeys = kStepKeys;
  static constexpr unsigned kAllSeen = 0xffffffffu;
  static constexpr bool kIsBytes = true, kShares = true, kInRuns = true;

  int token_bytes;         // from one token to the next
  int key_at, next_chunk;  // this lane's first chunk of keys, and the bit in which its other one differs
  int value_at[2];         // its chunk of the values of an even token and of the next, or the other way round

  __device__ explicit BoxTile(const Problem& problem) : token_bytes(problem.together * kHeadBytes) {
    const int together = problem.together, lane = threadIdx.x % 32, head = threadIdx.x / 32 & (together - 1);
    const int key = lane / 4, in_quad = lane % 4;
    const auto place = [&](int token, int chunk) {
      const int row = token * together + head;
      return row * kHeadBytes + ((chunk ^ row % 8) * kAccess);
    };
    key_at = place(key, first_chunk(in_quad)), next_chunk = together * kAccess;
#pragma unroll
    for (int i = 0; i < 2; ++i) value_at[i] = place(2 * in_quad + (in_quad + i) % 2, key);
  }

  static __device__ void meet_all() { meet(1, kThreads); }

  // Of a lane's two chunks of keys; the other one has the bit that tells apart how rows of two tokens are swizzled.
  __device__ int first_chunk(int in_quad) const {
    const int together = token_bytes / kHeadBytes;
    return in_quad % together + in_quad / together * together * 2;
  }

  // Lane l has channels of two chunks, four in each step.
  __device__ int query_channel(int step, int half, int lane) const {
    const int chunk = first_chunk(lane % 4) + step / 4 * (token_bytes / kHeadBytes);
    return kAccess * chunk + 4 * (step % 4) + 2 * half;
  }

  // products[2] [16, 8] of the keys and up to 8 queries.
  template <bool TURNED, typename Queries>
  __device__ void multiply_keys(float (&products)[2][4], const Queries& queries, const char* keys, int) const {
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
      const char* mine = keys + (chunk ? key_at ^ next_chunk : key_at);
      Words found[4];  // of keys l / 4, and 8, 16 and 24 further
#pragma unroll
      for (int i = 0; i < 4; ++i) found[i] = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(mine + 8 * i * token_bytes));
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const Words query = queries(4 * chunk + word);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          uint32_t upper[2], lower[2];
          widen_bytes<S, false>(found[2 * tile].data[word], upper);
          widen_bytes<S, false>(found[2 * tile + 1].data[word], lower);
          multiply_add<T>(products[tile], {upper[0], lower[0], upper[1], lower[1]}, query.data[0], query.data[2]);
        }
      }
    }
  }

  // sums[8] [16, 8] of values, turned, and the weights of 8 keys each: lane l has channels 16 (l / 4) ... + 15, two in each.
  template <bool TURNED>
  __device__ void add_values(float (&sums)[8][4], uint32_t (&weights)[4], const char* values, int lane) const {
    const unsigned order = lane % 2 ? 0x1032 : 0x3210;  // of a pair of tokens, as this lane reads them
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = __byte_perm(weights[i], 0, order);
#pragma unroll
    for (int first = 0; first < kKeys; first += 16) {
      Words found[2][2];  // of tokens 2 (l % 4) and the next, and 8 further
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const char* from = values + value_at[i % 2] + (first + i / 2 * 8) * token_bytes;
        found[i / 2][i % 2] = load<uint32_t, 4>(reinterpret_cast<const uint32_t*>(from));
      }
#pragma unroll
      for (int word = 0; word < 4; ++word) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of four channels the first two or the last
          uint32_t near[2], far[2];             // of each channel a pair of keys
          const unsigned which = half ? 0x7362 : 0x5140;
          widen_bytes<S, false>(__byte_perm(found[0][0].data[word], found[0][1].data[word], which), near);
          widen_bytes<S, false>(__byte_perm(found[1][0].data[word], found[1][1].data[word], which), far);
          multiply_add<T>(sums[2 * word + half], {near[0], near[1], far[0], far[1]}, weights[first / 8],
                          weights[first / 8 + 1]);
        }
      }
    }
  }
};

#ifdef EJKERNEL_BOXES
// A place in the ring, and which time around it is.
struct Slot {
  int stages, number = 0;
  unsigned phase = 0;

  __device__ void advance() {
    if (++number == stages) number = 0, phase ^= 1;
  }
};

// The warp that copies.
struct Copier {
  const Problem& problem;
  const Boxes& boxes;
  Notes& notes;
  Ring& ring;
  char* slots;
  Slot slot;
  int lane = threadIdx.x % 32;
  CachePolicy policy = read_once();  // what workers leave for the merge is read again

  // Where a key lies; no page where the tile does not go so far.
  struct Place {
    int page, token;
    bool visible;
  };

  __device__ Place look_up(const int32_t* table, int lowest, int last, int key) const {
    const int before = int(problem.page.divide(key));
    const int page = key < last ? table[before] : -1;
    const bool there = unsigned(page) < unsigned(problem.requests.pages);
    return {page, key - before * int(problem.requests.page_size), there && key >= lowest};
  }

  __device__ void load_side(char* to, const Side& side, const RowMap& map, const Piece& piece, const Place& place) const {
    const int head = piece.tile.key_head, batch = side.batch ? piece.request.batch : 0;
    const bool apart = heads_apart(side);
    load_rows(to, map, &ring.full[slot.number], policy, apart ? place.token : head, apart ? head : place.token, place.page,
              batch);
  }

  // The boxes of one warp's step that have a visible key; their bytes.
  __device__ int begin_step(const Piece& piece, const Place& place, int turn) const {
    const int token_bytes = problem.together * kHeadBytes, tokens = boxes.tokens;
    const unsigned seen = __ballot_sync(kWarp, place.visible), of_box = 0xffffffffu >> (32 - tokens) << (lane & -tokens);
    if (lane == 0) notes.seen[turn][slot.number] = int(seen);
    const bool begins = (lane & (tokens - 1)) == 0 && (seen & of_box);
    const unsigned begun = __ballot_sync(kWarp, begins);
    if (begins) {
      char* to = slots + slot.number * 2 * kSideBytes + (turn * kStepKeys + lane) * token_bytes;
      load_side(to, problem.key, boxes.key, piece, place);
      load_side(to + kSideBytes, problem.value, boxes.value, piece, place);
    }
    return 2 * __popc(begun) * tokens * token_bytes;
  }

  __device__ void fill(const Piece& piece) {
    const int32_t* table = piece.request.table(problem);
    const int lowest = piece.request.lowest(problem, piece.tile.local);
    const int end = (piece.request.first_step + piece.to) * kStepKeys;
    const int last = min(piece.request.last(problem, piece.tile.local), end);
    int key = (piece.request.first_step + piece.from) * kStepKeys + lane;
    Place next = look_up(table, lowest, last, key);
#pragma unroll 1
    for (int step = piece.from; step < piece.to; step += 1 << problem.turns_bits) {
      await(&ring.empty[slot.number], slot.phase ^ 1);
      int bytes = 0;
#pragma unroll 1
      for (int turn = 0; turn < 1 << problem.turns_bits; ++turn) {
        const Place place = next;
        key += kStepKeys;
        next = look_up(table, lowest, last, key);  // on its way until the next step
        bytes += begin_step(piece, place, turn);
      }
      if (lane == 0) arrive_expecting(&ring.full[slot.number], bytes);
      slot.advance();
    }
    if (!piece.whole()) return;
    await(&ring.empty[slot.number], slot.phase ^ 1);  // for what the others gather of the tile
    if (lane == 0) arrive(&ring.full[slot.number]);
    slot.advance();
  }
};

// The other warps.
template <typename S>
struct BoxAttention : Sums<BoxTile<S>, true> {
  using Base = Sums<BoxTile<S>, true>;
  using Layout = typename Base::Layout;
  using Base::problem, Base::notes, Base::layout, Base::lane, Base::warp, Base::together, Base::my_head, Base::my_turn;
  using typename Base::Scales;

  Ring& ring;
  char* slots;
  Slot slot;

  __device__ BoxAttention(const Problem& problem, const Results& results, Notes& notes, Ring& ring, char* slots, int stages)
      : Base(problem, results, notes), ring(ring), slots(slots), slot{stages} {}

  __device__ char* slot_at() const { return slots + slot.number * 2 * kSideBytes; }

  __device__ void leave() {
    __syncwarp();
    if (lane == 0) arrive(&ring.empty[slot.number]);
    slot.advance();
  }

  // Zeros in place of values of this warp that no query sees, which may be NaN.
  __device__ void hide(char* values, unsigned seen) const {
    if (!(seen >> lane & 1u)) {
#pragma unroll
      for (int byte = 0; byte < kHeadBytes; byte += kAccess) {
        char* to = values + lane * layout.token_bytes + my_head() * kHeadBytes + byte;
        store(reinterpret_cast<uint32_t*>(to), Pack<uint32_t, 4>{});
      }
    }
    show_to_async();
    __syncwarp();
  }

  __device__ void walk(const Piece& piece) {
    this->clear();
    Queries<kHeadBytes> queries(nullptr, lane);
    const Scales scales = this->read_scales(piece.request, piece.tile.key_head + my_head());
    this->read_queries(queries, this->queries_of(piece.request, piece.tile), piece.tile);
    const float factor = this->factor_of(scales.key);
    if (lane == 0) notes.value_scale[warp] = scales.value;
    const int beside = my_turn() * kStepKeys * layout.token_bytes;
#pragma unroll 1
    for (int step = piece.from; step < piece.to; step += 1 << problem.turns_bits) {
      await(&ring.full[slot.number], slot.phase);
      int known = 0;
      if (lane == 0) known = notes.seen[my_turn()][slot.number];  // the lane that tells the copier when it may change
      const unsigned seen = unsigned(__shfl_sync(kWarp, known, 0));
      char *keys = slot_at() + beside, *values = keys + kSideBytes;
      if (seen) {
        if (seen != Layout::kAllSeen) hide(values, seen);
        this->take(queries, factor, keys, values, seen);
      }
      leave();
    }
  }

  __device__ void take_piece(const Piece& piece) {
    if (piece.last) start_next_kernel();  // it finds out meanwhile what it is to put together
    walk(piece);
    if (!piece.whole()) return this->finish(piece, nullptr);
    await(&ring.full[slot.number], slot.phase);
    this->finish(piece, reinterpret_cast<float*>(slot_at()));
    show_to_async();
    leave();
  }
};
#endif

// `workers` blocks of kBoxThreads. They may begin before the kernel ahead of them has ended, and touch nothing until it has.
template <typename S>
__global__ void __maxnreg__(kBoxRegisters)
    attend_boxes(const __grid_constant__ Problem problem, const __grid_constant__ Results results,
                 const __grid_constant__ Boxes boxes, Divisor workers, int stages) {
#ifdef EJKERNEL_BOXES
  EJKERNEL_SHARED_REST(char, memory);
  char* slots = memory + (-shared_address(memory) & (kBoxAlign - 1));
  char* behind = slots + stages * 2 * kSideBytes;
  Ring& ring = *reinterpret_cast<Ring*>(behind);
  Notes& notes = *reinterpret_cast<Notes*>(behind + sizeof(Ring));
  const int warp = same_in_warp(int(threadIdx.x) / 32);
  if (threadIdx.x == 0) {
    for (int i = 0; i < stages; ++i) open_barrier(&ring.full[i], 1), open_barrier(&ring.empty[i], kWarps);
    publish_barriers();
  }
  __syncthreads();
  wait_for_last_kernel();
  if (warp < kWarps) Request::fetch_tables_ahead(problem);
  if (threadIdx.x == 0) results.splits[blockIdx.x].workers = 0;
  Copier copier{problem, boxes, notes, ring, slots, {stages}};
  BoxAttention<S> attention(problem, results, notes, ring, slots, stages);
  each_piece(problem, workers, [&](const Piece& piece) { warp == kWarps ? copier.fill(piece) : attention.take_piece(piece); });
#endif
}

}  // namespace ejkernel::paged_attention
