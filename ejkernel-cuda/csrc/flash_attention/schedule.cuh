// Which tiles of keys a block of queries visits, which pairs are hidden, the order in which blocks are worked on, and how the
// last of them are shared.
#pragma once

#include "hopper.cuh"

namespace ejkernel::flash_attention {

// Tiles [low, high).
struct Range {
  int low, high;

  EJKERNEL_BOTH bool has(int tile) const { return tile >= low && tile < high; }
};

EJKERNEL_BOTH inline int smaller(int a, int b) { return a < b ? a : b; }

EJKERNEL_BOTH inline int between(int low, int value, int high) { return value < low ? low : smaller(value, high); }

// Query i sees key j if i - below <= j <= i + above; both may be negative, and so large that they hide nothing.
struct Rules {
  int queries, keys, below, above;

  // Tiles whose every key is seen by all of queries first ... last; `whole` leaves out one that passes the end of the keys.
  EJKERNEL_BOTH Range seen_by_all(int first, int last, int block_k, bool whole) const {
    const int low = (between(0, last - below, keys) + block_k - 1) / block_k;
    const int end = between(0, first + above + 1, keys);
    return {low, whole || end < keys ? end / block_k : (keys + block_k - 1) / block_k};
  }
};

// The tiles that queries first ... last need; none beyond the keys, and low = high where there are none.
EJKERNEL_BOTH inline Range tiles_of(const Rules& rules, int first, int last, int block_k) {
  const int low = between(0, first - rules.below, rules.keys) / block_k;
  const int high = (between(0, last + rules.above + 1, rules.keys) + block_k - 1) / block_k;
  return {low, high > low ? high : low};
}

// The place of a block of queries; a row is a head of a batch member.
struct Place {
  int row, block;
};

// Rows of a section are worked on at one time, so that what they share stays in the cache, and
// their blocks follow each other, the last ones first where those have the most work.
struct Order {
  int blocks, heads, batch, section;
  bool last_first;

  EJKERNEL_BOTH Place place(int work) const {
    const int rows = heads * batch, full = section * blocks;  // `full` is at most the total
    const int start = work / full * section, rest = work % full;
    const int width = smaller(section, rows - start);
    const int row = start + rest % width, block = rest / width;
    return {row, last_first ? blocks - 1 - block : block};
  }

  EJKERNEL_BOTH int batch_of(const Place& place) const { return place.row / heads; }
  EJKERNEL_BOTH int head_of(const Place& place) const { return place.row % heads; }
};

// The work of one of `programs`, round by round; every other round deals it out in the other direction, so that none gets the
// longest of each.
EJKERNEL_BOTH inline int work_of(int program, int programs, int round) {
  return round * programs + (round % 2 ? programs - 1 - program : program);
}

// A part of a block's tiles, none where the range is empty.
struct Piece {
  int block;  // of those that are shared
  Range tiles;
};

// The last blocks, which are too few for another round of all programs: their tiles, one block's after the other's, are dealt
// out evenly (Osama et al., Stream-K, 2023). No program has more than a block's, so that a share lies in two blocks at most.
struct Shares {
  int first, rounds;  // of the blocks that are shared; those before are whole, in so many rounds of all programs
  int blocks;         // that are shared, 0 where none are
  int low, tiles;     // of each: so many tiles from `low` on, which are what any of them visits
  int programs;       // that have a share, more than there are blocks
  int each, longer;   // tiles of a share; the first `longer` have one more

  EJKERNEL_BOTH int begin(int program) const { return program * each + smaller(program, longer); }

  // Whose a tile is, counted from the first one of the first block.
  EJKERNEL_BOTH int owner(int tile) const {
    const int of_longer = longer * (each + 1);
    return tile < of_longer ? tile / (each + 1) : longer + (tile - of_longer) / each;
  }

  // The first or the second piece of a program.
  EJKERNEL_BOTH Piece piece(int program, int number) const {
    if (program >= programs || number > 1) return {};
    const int from = begin(program), block = from / tiles + number;
    const int end = smaller(tiles, begin(program + 1) - block * tiles);
    return {block, {low + (number ? 0 : from - block * tiles), low + end}};
  }

  // Which of its program's pieces belongs to the block.
  EJKERNEL_BOTH int number_in(int program, int block) const { return begin(program) < block * tiles; }
};

}  // namespace ejkernel::flash_attention
