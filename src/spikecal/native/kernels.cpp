// The kernels, written once and compiled for every instruction set with its own LANES and NAME.
// No templates of the standard library here: the linker might keep the copy of the wrong instruction set.
#include "layer.h"

#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef LANES
#define LANES 4
#define NAME portable
#endif

namespace spikecal {
namespace NAME {

constexpr int TABLES_AT_ONCE = 5 << 10;  // floats that stay in the nearest cache beside a row of currents

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline int least(int a, int b) { return a < b ? a : b; }
static inline Vec load(const float* p) { return *(const Vec*)p; }
static inline void store(float* p, Vec x) { *(Vec*)p = x; }

// x where its lane's bit is set, else 0
static inline Vec keep(Vec x, unsigned bits) {
#if LANES == 16
  return (Vec)_mm512_maskz_mov_ps((__mmask16)bits, (__m512)x);
#elif LANES == 8
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  __m256i hit = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), lane), lane);
  return (Vec)_mm256_and_ps((__m256)x, _mm256_castsi256_ps(hit));
#else
  for (int l = 0; l < LANES; ++l) x[l] = bits >> l & 1 ? x[l] : 0.0f;
  return x;
#endif
}

typedef int32_t Int __attribute__((vector_size(4 * LANES), may_alias));

static inline Vec ones(unsigned bits) { return keep((Vec)((Int){} - 1), bits); }
static inline Vec both(Vec mask, Vec x) { return (Vec)((Int)mask & (Int)x); }

// Neurons that have reached their threshold fire and lose it; which lanes did, as bits.
static inline unsigned fire(Vec& potential, Vec threshold) {
#if LANES == 16
  const __mmask16 hit = _mm512_cmp_ps_mask((__m512)potential, (__m512)threshold, _CMP_GE_OQ);
  potential = (Vec)_mm512_mask_sub_ps((__m512)potential, hit, (__m512)potential, (__m512)threshold);
  return hit;
#elif LANES == 8
  const __m256 hit = _mm256_cmp_ps((__m256)potential, (__m256)threshold, _CMP_GE_OQ);
  potential -= both((Vec)hit, threshold);
  return (unsigned)_mm256_movemask_ps(hit);
#else
  unsigned bits = 0;
  for (int l = 0; l < LANES; ++l) bits |= (unsigned)(potential[l] >= threshold[l]) << l;
  potential -= keep(threshold, bits);
  return bits;
#endif
}

static inline unsigned bits_at(const uint64_t* words, int channel) {
  return (unsigned)(words[channel / 64] >> channel % 64) & ((1u << LANES) - 1);
}

// How the output channels of one group are cut: `width` vectors that stay in registers for `pixels` neighbours.
struct Block {
  int first, width, pixels;
};

static inline int group_channels(const Conv& c, int out_channels) {
  return c.groups == 1 ? padded(out_channels) : out_channels / c.groups;
}

static inline int width_at(int vectors_left) {
  return vectors_left >= 8 ? 8 : vectors_left >= 4 ? 4 : vectors_left >= 2 ? 2 : 1;
}

// Neighbouring outputs share the pass over their events where a few vectors would leave registers idle.
static inline int pixels_for(const Conv& c, int width) {
  const int most = width >= 8 ? 1 : width == 4 ? 2 : 4;
  if (c.tables) return most;
  if (c.dilation_w != 1 || c.kernel_w == 1 || c.stride_w > 2) return 1;
  return most > 2 ? 2 : most;  // wider passes meet more events that some of their pixels do not see
}

static Block block_of(const Conv& c, int out_channels, int index) {
  int vectors = group_channels(c, out_channels) / LANES, first = 0;
  for (;; --index) {
    int width = width_at(vectors - first);
    if (index == 0) return {first * LANES, width, pixels_for(c, width)};
    first += width;
  }
}

static int blocks_in_group(const Conv& c, int out_channels) {
  int vectors = group_channels(c, out_channels) / LANES, count = 0;
  for (int first = 0; first < vectors; ++count) first += width_at(vectors - first);
  return count;
}

// Events are listed once for all blocks, so all blocks of a convolution use the layout of the widest pass.
static int most_pixels(const Conv& c, int out_channels) {
  int most = 1;
  for (int i = 0; i < blocks_in_group(c, out_channels); ++i) {
    int pixels = block_of(c, out_channels, i).pixels;
    most = pixels > most ? pixels : most;
  }
  return most;
}

// Zeros before the weights of an input channel: what a neighbour's window does not reach adds nothing.
static int lead(const Conv& c, int out_channels) { return (most_pixels(c, out_channels) - 1) * c.stride_w; }
static int span(const Conv& c, int out_channels) { return c.kernel_w + lead(c, out_channels); }

static inline int nibbles(const Conv& c) { return (c.in_channels / c.groups + 3) / 4; }

static size_t block_floats(const Conv& c, int out_channels, int width) {
  if (c.tables) return (size_t)c.kernel_h * c.kernel_w * nibbles(c) * 16 * width * LANES;
  size_t columns = (size_t)(c.in_channels / c.groups) * span(c, out_channels) + lead(c, out_channels);
  return columns * c.kernel_h * width * LANES;
}

static size_t group_floats(const Conv& c, int out_channels) {
  size_t total = 0;
  for (int i = 0; i < blocks_in_group(c, out_channels); ++i)
    total += block_floats(c, out_channels, block_of(c, out_channels, i).width);
  return total;
}

static size_t packed_floats(const Conv& c, int out_channels) {
  if (depthwise(c, out_channels)) return (size_t)c.kernel_h * c.kernel_w * padded(out_channels);
  return group_floats(c, out_channels) * c.groups;
}

// weight: (out, in / groups, kernel_h, kernel_w) as torch has it; height: of the spikes of each input channel.
static void pack(const Conv& c, int out_channels, const float* weight, const float* height, float* packed) {
  const int inputs = c.in_channels / c.groups, outputs = out_channels / c.groups, taps = c.kernel_h * c.kernel_w;
  memset(packed, 0, packed_floats(c, out_channels) * sizeof(float));
  if (depthwise(c, out_channels)) {
    for (int o = 0; o < out_channels; ++o)
      for (int k = 0; k < taps; ++k) packed[(size_t)k * padded(out_channels) + o] = weight[o * taps + k] * height[o];
    return;
  }
  const int step = span(c, out_channels), zeros = lead(c, out_channels);
  for (int g = 0; g < c.groups; ++g)
    for (int b = 0; b < blocks_in_group(c, out_channels); ++b) {
      const Block block = block_of(c, out_channels, b);
      const int wide = block.width * LANES;
      if (c.tables) {
        for (int k = 0; k < taps; ++k)
          for (int i = 0; i < nibbles(c) * 4; ++i)
            for (int pattern = 0; pattern < 16 && i < inputs; ++pattern)
              for (int o = 0; o < wide && block.first + o < outputs && (pattern >> i % 4 & 1); ++o)
                packed[((size_t)(k * nibbles(c) + i / 4) * 16 + pattern) * wide + o] +=
                    weight[((size_t)(g * outputs + block.first + o) * inputs + i) * taps + k] * height[g * inputs + i];
        packed += block_floats(c, out_channels, block.width);
        continue;
      }
      for (int ky = 0; ky < c.kernel_h; ++ky) {
        for (int i = 0; i < inputs; ++i)
          for (int kx = 0; kx < c.kernel_w; ++kx) {
            float* to = packed + ((size_t)i * step + zeros + kx) * wide;
            for (int o = 0; o < wide && block.first + o < outputs; ++o) {
              size_t from = ((size_t)(g * outputs + block.first + o) * inputs + i) * taps + ky * c.kernel_w + kx;
              to[o] = weight[from] * height[g * inputs + i];
            }
          }
        packed += ((size_t)inputs * step + zeros) * wide;
      }
    }
}

static void unpack(const uint64_t* spikes, size_t pixels, int channels, const float* height, float* dense) {
  const int size = words(channels), whole = channels / LANES * LANES;
  for (size_t q = 0; q < pixels; ++q, spikes += size, dense += channels) {
    int c = 0;
    for (; c < whole; c += LANES) store(dense + c, keep(load(height + c), bits_at(spikes, c)));
    for (; c < channels; ++c) dense[c] = spikes[c / 64] >> c % 64 & 1 ? height[c] : 0.0f;
  }
}

// How often each neuron of some pixels fires in T steps, times the height; `stride`: words from step to step.
static void count(const uint64_t* spikes, int T, size_t stride, size_t pixels, int channels, const float* height,
                  float* counts) {
  const int size = words(channels), whole = channels / LANES * LANES;
  const Vec one = (Vec){} + 1.0f;
  for (size_t q = 0; q < pixels; ++q, spikes += size, counts += channels) {
    int c = 0;
    for (; c < whole; c += LANES) {
      Vec sum = {};
      for (int t = 0; t < T; ++t) sum += keep(one, bits_at(spikes + t * stride, c));
      store(counts + c, sum * load(height + c));
    }
    for (; c < channels; ++c) {
      int sum = 0;
      for (int t = 0; t < T; ++t) sum += spikes[t * stride + c / 64] >> c % 64 & 1;
      counts[c] = (float)sum * height[c];
    }
  }
}

static void list(const Conv& c, int out_channels, int t, int n, int N, Events events) {
  const int size = words(c.in_channels), inputs = c.in_channels / c.groups, step = span(c, out_channels);
  const uint64_t* image = c.spikes + (size_t)(t * (size_t)N + n) * c.in_h * c.in_w * size;
  uint32_t at = 0, *offsets = events.offsets;
  for (int g = 0; g < c.groups; ++g) {
    const int low = g * inputs, high = low + inputs;
    for (int y = 0; y < c.map_h; ++y)
      for (int x = 0; x < c.map_w; ++x) {
        *offsets++ = at;
        for (int wy = 0; wy < c.window_h; ++wy)
          for (int wx = 0; wx < c.window_w; ++wx) {
            const uint64_t* pixel = image + ((size_t)(y * c.hop_h + wy) * c.in_w + x * c.hop_w + wx) * size;
            for (int w = low / 64; w <= (high - 1) / 64; ++w) {
              uint64_t bits = pixel[w];
              if (c.groups > 1) {
                if (w * 64 < low) bits &= ~0ull << (low - w * 64);
                if (w * 64 + 64 > high) bits &= ~0ull >> (w * 64 + 64 - high);
              }
              for (; bits; bits &= bits - 1)
                events.entries[at++] = (uint32_t)((w * 64 + __builtin_ctzll(bits) - low) * step + x);
            }
          }
      }
    *offsets++ = at;
  }
}

struct Range {
  int from, to;
};

// How many lines of a kernel to add at once: one, if the weights of all would leave little of the second cache.
static int lines_at_once(const Conv& c, int out_channels, int width) {
  return block_floats(c, out_channels, width) * sizeof(float) > 128 * 1024 ? 1 : c.kernel_h;
}

// Adds the weight rows of the events to PIXELS neighbouring outputs of WIDTH vectors.
template <int WIDTH, int PIXELS>
static inline void add(Vec* sum, const uint32_t* from, const uint32_t* to, const float* weights, ptrdiff_t neighbour) {
  for (; from != to; ++from) {
    const float* row = weights + (ptrdiff_t)*from * (WIDTH * LANES);
#pragma GCC unroll 8
    for (int p = 0; p < PIXELS; ++p)
#pragma GCC unroll 8
      for (int i = 0; i < WIDTH; ++i) sum[p * WIDTH + i] += load(row - p * neighbour + i * LANES);
  }
}

template <int WIDTH, int PIXELS>
static inline void pixel_sum(const Conv& c, const Events& e, const uint32_t* offsets, const float* weights, int zeros,
                             int step, int y, int x, Range kernel, float* out) {
  constexpr int WIDE = WIDTH * LANES;
  const size_t plane = ((size_t)(c.in_channels / c.groups) * step + zeros) * WIDE;  // weights of one kernel row
  Vec sum[PIXELS * WIDTH];
#pragma GCC unroll 8
  for (int i = 0; i < PIXELS * WIDTH; ++i) sum[i] = load(out + i * LANES);
  const int left = x * c.stride_w - c.pad_w;
  for (int ky = kernel.from; ky < kernel.to; ++ky) {
    const int row = y * c.stride_h + ky * c.dilation_h - c.pad_h;
    if (row < 0 || row >= c.map_h) continue;
    const uint32_t* line = offsets + row * c.map_w;
    const float* w = weights + ky * plane;
    if (c.dilation_w == 1) {
      int low = left, high = left + (PIXELS - 1) * c.stride_w + c.kernel_w;
      low = low < 0 ? 0 : low > c.map_w ? c.map_w : low;
      high = high > c.map_w ? c.map_w : high;
      if (low < high)
        add<WIDTH, PIXELS>(sum, e.entries + line[low], e.entries + line[high], w + (ptrdiff_t)(zeros - left) * WIDE,
                           (ptrdiff_t)c.stride_w * WIDE);
    } else {
      for (int kx = 0; kx < c.kernel_w; ++kx) {
        const int column = left + kx * c.dilation_w;
        if (column >= 0 && column < c.map_w)
          add<WIDTH, 1>(sum, e.entries + line[column], e.entries + line[column + 1],
                        w + (ptrdiff_t)(zeros + kx - column) * WIDE, 0);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < PIXELS * WIDTH; ++i) store(out + i * LANES, sum[i]);
}

template <int WIDTH, int PIXELS>
static void row_sum(const Conv& c, const Events& e, const uint32_t* offsets, const float* weights, int zeros, int step,
                    int y, int out_w, Range kernel, float* row) {
  int x = 0;
  for (; x + PIXELS <= out_w; x += PIXELS)
    pixel_sum<WIDTH, PIXELS>(c, e, offsets, weights, zeros, step, y, x, kernel, row + (size_t)x * WIDTH * LANES);
  for (; x < out_w; ++x)
    pixel_sum<WIDTH, 1>(c, e, offsets, weights, zeros, step, y, x, kernel, row + (size_t)x * WIDTH * LANES);
}

// PIXELS neighbouring outputs, by looking up the sum of every four inputs under the kernel's columns `from` ... `to`.
template <int WIDTH, int PIXELS>
static inline void pixel_lookup(const Conv& c, const uint64_t* line, const float* table, int from, int to, int low,
                                int x, float* out) {
  constexpr int WIDE = WIDTH * LANES;
  const int size = words(c.in_channels), count = nibbles(c);
  Vec sum[PIXELS * WIDTH];
#pragma GCC unroll 8
  for (int i = 0; i < PIXELS * WIDTH; ++i) sum[i] = load(out + i * LANES);
  for (int kx = from; kx < to; ++kx) {
    const uint64_t* cell = line + (x * c.stride_w + kx * c.dilation_w) * size + low / 64;
    for (int left = count; left > 0; left -= 16, ++cell) {  // 16 times four inputs are one word
      uint64_t bits[PIXELS];
#pragma GCC unroll 4
      for (int p = 0; p < PIXELS; ++p) bits[p] = cell[p * c.stride_w * size] >> low % 64;
      for (int k = left < 16 ? left : 16; k > 0; --k, table += 16 * WIDE)
#pragma GCC unroll 4
        for (int p = 0; p < PIXELS; ++p) {
          const float* entry = table + (bits[p] & 15) * WIDE;
          bits[p] >>= 4;
#pragma GCC unroll 8
          for (int i = 0; i < WIDTH; ++i) sum[p * WIDTH + i] += load(entry + i * LANES);
        }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < PIXELS * WIDTH; ++i) store(out + i * LANES, sum[i]);
}

// The rows of spikes under the kernel, with zeros where it reaches over the border.
static void copy_lines(const Conv& c, const uint64_t* image, int y, int out_w, uint64_t* lines) {
  const size_t size = words(c.in_channels), length = reach(c, out_w) * size;
  for (int ky = 0; ky < c.kernel_h; ++ky, lines += length) {
    const int row = y * c.stride_h + ky * c.dilation_h - c.pad_h;
    memset(lines, 0, length * sizeof(uint64_t));
    if (row >= 0 && row < c.map_h)
      memcpy(lines + c.pad_w * size, image + row * c.in_w * size, c.map_w * size * sizeof(uint64_t));
  }
}

// The whole row passes by a few tables at a time, so that these stay in the nearest cache.
template <int WIDTH, int PIXELS>
static void row_lookup(const Conv& c, const uint64_t* lines, const float* tables, int low, int out_w, float* row) {
  constexpr int WIDE = WIDTH * LANES;
  const int tap = nibbles(c) * 16 * WIDE, length = reach(c, out_w) * words(c.in_channels);
  const int fitting = TABLES_AT_ONCE / tap, columns = fitting > c.kernel_w ? c.kernel_w : fitting ? fitting : 1;
  for (int ky = 0; ky < c.kernel_h; ++ky, lines += length)
    for (int from = 0, to; from < c.kernel_w; tables += (to - from) * tap, from = to) {
      to = from + columns < c.kernel_w ? from + columns : c.kernel_w;
      int x = 0;
      for (; x + PIXELS <= out_w; x += PIXELS)
        pixel_lookup<WIDTH, PIXELS>(c, lines, tables, from, to, low, x, row + (size_t)x * WIDE);
      for (; x < out_w; ++x) pixel_lookup<WIDTH, 1>(c, lines, tables, from, to, low, x, row + (size_t)x * WIDE);
    }
}

// A depthwise convolution has so little work per event that reading all bits is cheaper than listing them: the bits
// of the rows under the kernel become masks, and the weights are added under them.
template <int KERNEL>  // 0: any
static void depthwise_sum(const Conv& c, const float* masks, const float* weights, int channels, int out_w, float* row,
                          int next) {
  const int height = KERNEL ? KERNEL : c.kernel_h, width = KERNEL ? KERNEL : c.kernel_w;
  const size_t length = (size_t)reach(c, out_w) * LANES;
  Vec w[KERNEL ? KERNEL * KERNEL : 1];
  if (KERNEL)
    for (int k = 0; k < KERNEL * KERNEL; ++k) w[k] = load(weights + (size_t)k * channels);
  for (int x = 0; x < out_w; ++x, row += next) {
    Vec sum = load(row);
#pragma GCC unroll 3
    for (int ky = 0; ky < height; ++ky)
#pragma GCC unroll 3
      for (int kx = 0; kx < width; ++kx) {
        const Vec weight = KERNEL ? w[ky * width + kx] : load(weights + (size_t)(ky * width + kx) * channels);
        sum += both(load(masks + ky * length + (size_t)(x * c.stride_w + kx * c.dilation_w) * LANES), weight);
      }
    store(row, sum);
  }
}

static void depthwise_row(const Conv& c, const uint64_t* lines, int out_w, int first, int width, int channels,
                          float* row, float* masks) {
  const int size = words(c.in_channels), cells = c.kernel_h * reach(c, out_w);
  for (int i = 0; i < width; ++i) {
    const int channel = first + i * LANES;
    for (int k = 0; k < cells; ++k) store(masks + (size_t)k * LANES, ones(bits_at(lines + (size_t)k * size, channel)));
    if (c.kernel_h == 3 && c.kernel_w == 3)
      depthwise_sum<3>(c, masks, c.weights + channel, channels, out_w, row + i * LANES, width * LANES);
    else
      depthwise_sum<0>(c, masks, c.weights + channel, channels, out_w, row + i * LANES, width * LANES);
  }
}

// The blocks of a layer are those of its convolution with the most groups; without one, all channels at once.
static const Conv* leading(const Layer& l) {
  const Conv* found = nullptr;
  for (int i = 0; i < l.n_convs; ++i)
    if (!depthwise(l.convs[i], l.out_channels) && (!found || l.convs[i].groups > found->groups)) found = l.convs + i;
  return found;
}

static int vectors_of(const Layer& l) { return padded(l.out_channels) / LANES; }

static int blocks(const Layer& l) {
  const Conv* c = leading(l);
  if (c) return blocks_in_group(*c, l.out_channels) * c->groups;
  int count = 0;
  for (int first = 0; first < vectors_of(l); ++count) first += width_at(vectors_of(l) - first);
  return count;
}

template <int WIDTH, int PIXELS>
static void conv_row(const Layer& l, const Conv& c, const Events& e, const uint64_t* lines, const float* weights,
                     int group, int y, Range kernel, float* row) {
  if (c.tables) {
    row_lookup<WIDTH, PIXELS>(c, lines, weights, group * (c.in_channels / c.groups), l.out_w, row);
    return;
  }
  const uint32_t* offsets = e.offsets + (size_t)group * (c.map_h * c.map_w + 1);
  const int zeros = lead(c, l.out_channels), step = span(c, l.out_channels);
  row_sum<WIDTH, PIXELS>(c, e, offsets, weights, zeros, step, y, l.out_w, kernel, row);
}

// The weights of one block of output channels.
struct Place {
  const float* weights;
  int group, pixels;
};

static Place place_of(const Layer& l, const Conv& c, int first) {
  if (depthwise(c, l.out_channels)) return {c.weights, 0, 1};
  const int per_group = group_channels(c, l.out_channels), group = first / per_group;
  const float* weights = c.weights + group * group_floats(c, l.out_channels);
  for (int i = 0;; ++i) {
    const Block block = block_of(c, l.out_channels, i);
    if (block.first == first - group * per_group) return {weights, group, block.pixels};
    weights += block_floats(c, l.out_channels, block.width);
  }
}

static void add_conv(const Layer& l, const Conv& c, const Place& place, const Events& e, int t, int n, int first,
                     int width, int y, Range kernel, float* row, const Scratch& scratch) {
  const uint64_t* image = c.spikes + ((size_t)t * l.N + n) * c.in_h * c.in_w * words(c.in_channels);
  if (!has_events(c, l.out_channels)) copy_lines(c, image, y, l.out_w, scratch.lines);
  if (depthwise(c, l.out_channels)) {
    depthwise_row(c, scratch.lines, l.out_w, first, width, padded(l.out_channels), row, scratch.masks);
    return;
  }
  const auto [weights, group, pixels] = place;
  if (width == 8) conv_row<8, 1>(l, c, e, scratch.lines, weights, group, y, kernel, row);
  if (width == 4 && pixels == 2) conv_row<4, 2>(l, c, e, scratch.lines, weights, group, y, kernel, row);
  if (width == 4 && pixels == 1) conv_row<4, 1>(l, c, e, scratch.lines, weights, group, y, kernel, row);
  if (width == 2 && pixels == 4) conv_row<2, 4>(l, c, e, scratch.lines, weights, group, y, kernel, row);
  if (width == 2 && pixels == 2) conv_row<2, 2>(l, c, e, scratch.lines, weights, group, y, kernel, row);
  if (width == 2 && pixels == 1) conv_row<2, 1>(l, c, e, scratch.lines, weights, group, y, kernel, row);
  if (width == 1 && pixels == 4) conv_row<1, 4>(l, c, e, scratch.lines, weights, group, y, kernel, row);
  if (width == 1 && pixels == 2) conv_row<1, 2>(l, c, e, scratch.lines, weights, group, y, kernel, row);
  if (width == 1 && pixels == 1) conv_row<1, 1>(l, c, e, scratch.lines, weights, group, y, kernel, row);
}

// The currents of a row at a step at which nothing arrives.
template <int width>
static void start_row(const Layer& l, int t, int first, float* row) {
  for (int x = 0; x < l.out_w; ++x)
    for (int i = 0; i < width; ++i, row += LANES)
      store(row, l.bias ? load(l.bias + (size_t)t * padded(l.out_channels) + first + i * LANES) : (Vec){});
}

// The currents of a row at step t before the convolutions, from what else arrives at step u: `fresh` starts the sum.
template <int width>
static void add_inputs(const Layer& l, int t, int u, bool fresh, int n, int first, int y, float* row) {
  const int channels = padded(l.out_channels), size = words(l.out_channels);
  const size_t line = (size_t)y * l.out_w, map = (size_t)l.out_h * l.out_w;
  const float* bias = l.bias ? l.bias + (size_t)t * channels + first : nullptr;
  const float* constant = l.constant ? l.constant + (size_t)n * l.constant_stride + line * channels + first : nullptr;
  const float* addend = l.addend ? l.addend + (((size_t)u * l.N + n) * map + line) * channels + first : nullptr;
  const uint64_t* shortcut = l.shortcut ? l.shortcut + (((size_t)u * l.N + n) * map + line) * size : nullptr;
  for (int x = 0; x < l.out_w; ++x, row += width * LANES)
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i) {
      const size_t at = (size_t)x * channels + i * LANES;
      const int channel = first + i * LANES;
      Vec sum = !fresh ? load(row + i * LANES) : bias ? load(bias + i * LANES) : (Vec){};
      if (constant) sum += load(constant + at);
      if (addend) sum += load(addend + at);
      if (shortcut) sum += keep(load(l.height + channel), bits_at(shortcut + (size_t)x * size, channel));
      store(row + i * LANES, sum);
    }
}

template <int width>
static void end_row(const Layer& l, int t, int n, int first, int y, const float* row) {
  const int channels = padded(l.out_channels), bytes = words(l.out_channels) * 8, out_w = l.out_w;
  const size_t line = ((size_t)n * l.out_h + y) * out_w, later = (size_t)t * l.N * l.out_h * out_w;
  if (l.currents) {
    for (int x = 0; x < out_w; ++x)
      for (int i = 0; i < width; ++i, row += LANES)
        store(l.currents + (later + line + x) * channels + first + i * LANES, load(row));
    return;
  }
  float* v = l.v + line * channels + first;
  uint8_t* fired = (uint8_t*)l.fired + (later + line) * bytes + first / 8;  // little-endian: byte k has channels 8k ...
  Vec threshold[width];
#pragma GCC unroll 8
  for (int i = 0; i < width; ++i) threshold[i] = load(l.threshold + first + i * LANES);
  for (int x = 0; x < out_w; ++x, v += channels, fired += bytes)
#pragma GCC unroll 8
    for (int i = 0; i < width; ++i, row += LANES) {
      Vec potential = load(v + i * LANES) + load(row);
      const unsigned bits = t < l.start ? 0 : fire(potential, threshold[i]);
      store(v + i * LANES, potential);
#if LANES == 16
      fired[i * 2] = (uint8_t)bits;
      fired[i * 2 + 1] = (uint8_t)(bits >> 8);
#elif LANES == 8
      fired[i] = (uint8_t)bits;
#else
      const int half = first / LANES % 2 + i;
      if (half % 2 == 0)
        fired[half / 2] = (uint8_t)bits;
      else
        fired[half / 2] |= (uint8_t)(bits << 4);
#endif
    }
}

// Some rows and steps at a time. Kernel lines outside of them: the weights they read stay in the cache.
template <int WIDTH>
static void some_rows(const Layer& l, const Events* events, int n, int first, Range ys, Range ts,
                      const Scratch& scratch) {
  auto row = [&](int y, int t) {
    return scratch.row + ((size_t)(y - ys.from) * (ts.to - ts.from) + t - ts.from) * l.out_w * WIDTH * LANES;
  };
  // The steps whose input a neuron has got at step t and not before.
  auto arriving = [&](int t) { return Range{t ? t + l.delay : 0, least(t + l.delay + 1, l.T)}; };
  for (int y = ys.from; y < ys.to; ++y)
    for (int t = ts.from; t < ts.to; ++t) {
      const Range us = arriving(t);
      if (us.from >= us.to) start_row<WIDTH>(l, t, first, row(y, t));
      for (int u = us.from; u < us.to; ++u) add_inputs<WIDTH>(l, t, u, u == us.from, n, first, y, row(y, t));
    }
  for (int i = 0; i < l.n_convs; ++i) {
    const Conv& c = l.convs[i];
    const Place place = place_of(l, c, first);
    const int lines = has_events(c, l.out_channels) ? lines_at_once(c, l.out_channels, WIDTH) : c.kernel_h;
    for (int ky = 0; ky < c.kernel_h; ky += lines)
      for (int y = ys.from; y < ys.to; ++y)
        for (int t = ts.from; t < ts.to; ++t)
          for (int u = arriving(t).from; u < arriving(t).to; ++u)
            add_conv(l, c, place, events[((size_t)u * l.N + n) * l.n_convs + i], u, n, first, WIDTH, y,
                     {ky, ky + lines}, row(y, t), scratch);
  }
  for (int y = ys.from; y < ys.to; ++y)
    for (int t = ts.from; t < ts.to; ++t) end_row<WIDTH>(l, t, n, first, y, row(y, t));
}

template <int WIDTH>
static void all_rows(const Layer& l, const Events* events, int n, int first, int from, int to,
                     const Scratch& scratch) {
  const int steps = least(l.T, scratch.rows), rows = scratch.rows / steps;
  for (int y = from; y < to; y += rows)
    for (int t = 0; t < l.T; t += steps)
      some_rows<WIDTH>(l, events, n, first, {y, least(y + rows, to)}, {t, least(t + steps, l.T)}, scratch);
}

static void rows(const Layer& l, const Events* events, int n, int block, int from, int to,
                 const Scratch& scratch) {
  const Conv* c = leading(l);
  int first = 0, width = 0;
  if (c) {
    const int in_group = blocks_in_group(*c, l.out_channels);
    const Block found = block_of(*c, l.out_channels, block % in_group);
    first = block / in_group * group_channels(*c, l.out_channels) + found.first;
    width = found.width;
  } else {
    for (int i = 0; i <= block; ++i) {
      first += width;
      width = width_at(vectors_of(l) - first);
    }
    first *= LANES;
  }
  if (width == 8) all_rows<8>(l, events, n, first, from, to, scratch);
  if (width == 4) all_rows<4>(l, events, n, first, from, to, scratch);
  if (width == 2) all_rows<2>(l, events, n, first, from, to, scratch);
  if (width == 1) all_rows<1>(l, events, n, first, from, to, scratch);
}

}  // namespace NAME

#define JOIN(a, b) a##b
#define FACTORY(name) JOIN(kernels_, name)
const Kernels* FACTORY(NAME)() {
  static const Kernels all = {LANES, NAME::packed_floats, NAME::pack, NAME::blocks, NAME::unpack, NAME::count,
                              NAME::list, NAME::rows};
  return &all;
}

}  // namespace spikecal
