// What one layer of neurons computes, as plain buffers. Everything is channels-last; channels are padded to PAD.
//
//   input[t]   = constant + addend[t] + height * shortcut[t] + sum over convs of conv(spikes[t])
//   current[t] = bias[t] + (t == 0 ? input[0] + ... + input[delay] : t + delay < T ? input[t + delay] : 0)
//   v += current[t];  from step `start` on: fire where v >= threshold;  v -= threshold where fired          (Eq. 2-4)
//
// Spikes are bits: pixel (t, n, y, x) has `words(C)` 64-bit words, channel c in bit c % 64 of word c / 64.
#pragma once
#include <cstddef>
#include <cstdint>

namespace spikecal {

constexpr int PAD = 16;  // channels of all float buffers are a multiple of this

inline int padded(int channels) { return (channels + PAD - 1) / PAD * PAD; }
inline int words(int channels) { return (channels + 63) / 64; }

struct Conv {
  const uint64_t* spikes;  // [T][N][in_h][in_w][words(in_channels)]
  const float* weights;    // as `pack` has laid them out
  int32_t in_channels, in_h, in_w;
  int32_t window_h, window_w, hop_h, hop_w;  // average pooling in front: events of a window are read together
  int32_t map_h, map_w;                      // what the convolution sees after it
  int32_t kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups;
  int32_t tables;  // sums of every four inputs are looked up, whatever the firing rate; else only events cost
};

// Columns of a padded row, from pad_w zeros on the left to the last that any output reads.
inline int reach(const Conv& c, int out_w) {
  const int row = c.pad_w + c.map_w, read = (out_w - 1) * c.stride_w + (c.kernel_w - 1) * c.dilation_w + 1;
  return row > read ? row : read;
}

struct Layer {
  const Conv* convs;
  int32_t n_convs;
  int32_t T, N, out_h, out_w, out_channels;
  const float* constant;     // [N or 1][out_h][out_w][C], or null; with the bias of the neurons
  int64_t constant_stride;   // floats from image to image: 0 if all share it
  const float* addend;       // [T][N][out_h][out_w][C], or null
  const uint64_t* shortcut;  // [T][N][out_h][out_w][words], or null
  const float* height;       // [C], of the shortcut's spikes
  const float* bias;         // [T][C], or null
  const float* threshold;    // [C]
  float* v;                  // [N][out_h][out_w][C], updated
  uint64_t* fired;           // [T][N][out_h][out_w][words]
  float* currents;           // instead of neurons: [T][N][out_h][out_w][C], or null
  int32_t delay, start, threads;
};

// Max-pooling of spikes: an output fires when the busiest neuron of its window gets one spike ahead.
struct Pool {
  const uint64_t* spikes;  // [T][N][in_h][in_w][words]
  uint64_t* fired;         // [T][N][out_h][out_w][words], all zero
  int32_t* counts;         // [N][in_h][in_w][channels]: spikes of each neuron so far, updated
  int32_t* most;           // [N][out_h][out_w][channels]: of the busiest so far, updated
  const int32_t* rows;     // outputs whose windows hold row y: rows[row_start[y]] ... rows[row_start[y + 1] - 1]
  const int32_t* row_start;
  const int32_t* columns;
  const int32_t* column_start;
  int32_t T, N, channels, in_h, in_w, out_h, out_w, threads;
};

// The active inputs of every pixel of one image at one step: entries[offsets[q]] ... entries[offsets[q + 1] - 1].
// An entry is (channel in its group) * span + column, so that the weights of all columns of a window are found from
// it by a shift that does not depend on the entry.
struct Events {
  uint32_t* entries;
  uint32_t* offsets;  // [groups][map_h * map_w + 1]
};

// Working memory of one thread.
struct Scratch {
  float* row;       // the currents of some rows and one block
  int rows;         // how many of them
  uint64_t* lines;  // the spikes under a kernel
  float* masks;     // the same as masks, for a depthwise one
};

// One instruction set's build of the kernels.
struct Kernels {
  int lanes;
  size_t (*packed_floats)(const Conv&, int out_channels);
  void (*pack)(const Conv&, int out_channels, const float* weight, const float* height, float* packed);
  int (*blocks)(const Layer&);
  void (*unpack)(const uint64_t* spikes, size_t pixels, int channels, const float* height, float* dense);
  void (*count)(const uint64_t* spikes, int T, size_t stride, size_t pixels, int channels, const float* height,
                float* counts);
  void (*list)(const Conv&, int out_channels, int t, int n, int N, Events);
  void (*rows)(const Layer&, const Events* events, int n, int block, int from, int to, const Scratch&);
};

inline bool depthwise(const Conv& c, int out_channels) {
  return c.groups > 1 && c.groups == c.in_channels && c.groups == out_channels;
}

inline bool has_events(const Conv& c, int out_channels) { return !c.tables && !depthwise(c, out_channels); }

extern const Kernels* kernels_portable();
extern const Kernels* kernels_avx2();
extern const Kernels* kernels_avx512();

}  // namespace spikecal
