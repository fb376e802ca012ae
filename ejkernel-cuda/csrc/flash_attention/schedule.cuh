// Mask and tile scheduler: which KV tiles a query block visits, which pairs are masked, the order of blocks, and the stream-K
// partition of the last ones.
#pragma once

#include "hopper.cuh"

namespace ejkernel::flash_attention {

// Tiles [low, high).
struct Range {
  int low, high;

  EJKERNEL_HOST_DEVICE bool contains(int tile) const { return tile >= low && tile < high; }
};

EJKERNEL_HOST_DEVICE inline int min_of(int a, int b) { return a < b ? a : b; }

EJKERNEL_HOST_DEVICE inline int clamp(int low, int value, int high) { return value < low ? low : min_of(value, high); }

// Query i sees key j if i - below <= j <= i + above; both may be negative, or large enough to mask nothing.
struct MaskParams {
  int queries, keys, below, above;

  // Tiles whose keys are all visible to all of queries first ... last; `full_only` leaves out a tile that extends past the
  // keys.
  EJKERNEL_HOST_DEVICE Range fully_visible_tiles(int first, int last, int block_k, bool full_only) const {
    const int low = (clamp(0, last - below, keys) + block_k - 1) / block_k;
    const int end = clamp(0, first + above + 1, keys);
    return {low, full_only || end < keys ? end / block_k : (keys + block_k - 1) / block_k};
  }
};

// Tiles with a key visible to any of queries first ... last; fully masked tiles are skipped.
EJKERNEL_HOST_DEVICE inline Range visible_tiles(const MaskParams& mask, int first, int last, int block_k) {
  const int low = clamp(0, first - mask.below, mask.keys) / block_k;
  const int high = (clamp(0, last + mask.above + 1, mask.keys) + block_k - 1) / block_k;
  return {low, high > low ? high : low};
}

// Coordinate of a query block; a row is a head of a batch member.
struct TileCoord {
  int row, block;
};

// The blocks of an L2 group run at the same time, so that their shared keys stay in L2. Within a group blocks are in order, the
// last ones first if those have the most work.
struct TileScheduler {
  int blocks, heads, batch, l2_group;
  bool reverse_blocks;

  EJKERNEL_HOST_DEVICE TileCoord coord(int work) const {
    const int rows = heads * batch, full = l2_group * blocks;  // `full` is at most the total
    const int start = work / full * l2_group, rest = work % full;
    const int width = min_of(l2_group, rows - start);
    const int row = start + rest % width, block = rest / width;
    return {row, reverse_blocks ? blocks - 1 - block : block};
  }

  EJKERNEL_HOST_DEVICE int batch_of(const TileCoord& coord) const { return coord.row / heads; }
  EJKERNEL_HOST_DEVICE int head_of(const TileCoord& coord) const { return coord.row % heads; }
};

// The work index of a CTA in a wave. Every other wave is reversed, so that no CTA always gets the longest block.
EJKERNEL_HOST_DEVICE inline int work_of(int cta, int ctas, int wave) { return wave * ctas + (wave % 2 ? ctas - 1 - cta : cta); }

// A segment of a block's tiles; an empty range for none.
struct Segment {
  int block;  // index among the split blocks
  Range tiles;
};

// Stream-K partition (Osama et al., Stream-K, 2023) of the last blocks, which fill no wave: their tiles, block after block, are
// split evenly among CTAs. No CTA gets more tiles than a block has, so its tiles lie in at most two blocks.
struct StreamK {
  int first, waves;    // the first split block; the blocks before it are whole, in `waves` full waves
  int blocks;          // split blocks, 0 for none
  int low, tiles;      // of each split block: `tiles` tiles from `low` on, the union of what they visit
  int ctas;            // CTAs of the partition, more than `blocks`
  int per_cta, extra;  // tiles of a CTA; the first `extra` CTAs have one more

  EJKERNEL_HOST_DEVICE int begin(int cta) const { return cta * per_cta + min_of(cta, extra); }

  // The CTA of a tile, counted from the first tile of the first split block.
  EJKERNEL_HOST_DEVICE int owner(int tile) const {
    const int of_extra = extra * (per_cta + 1);
    return tile < of_extra ? tile / (per_cta + 1) : extra + (tile - of_extra) / per_cta;
  }

  // The first or second segment of a CTA.
  EJKERNEL_HOST_DEVICE Segment segment(int cta, int index) const {
    if (cta >= ctas || index > 1) return {};
    const int from = begin(cta), block = from / tiles + index;
    const int end = min_of(tiles, begin(cta + 1) - block * tiles);
    return {block, {low + (index ? 0 : from - block * tiles), low + end}};
  }

  // Which segment of the CTA belongs to the block.
  EJKERNEL_HOST_DEVICE int segment_in(int cta, int block) const { return begin(cta) < block * tiles; }
};

}  // namespace ejkernel::flash_attention
