// The C interface: choose an instruction set, share the work out to threads, own the lists of events.
#include "layer.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

using namespace spikecal;

namespace {

const Kernels* chosen(int lanes) {
#if defined(__x86_64__)
  if (lanes >= 16 && __builtin_cpu_supports("avx512f")) return kernels_avx512();
  if (lanes >= 8 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi")) return kernels_avx2();
#endif
  (void)lanes;
  return kernels_portable();
}

const Kernels* kernels = chosen(16);

constexpr size_t ROWS_AT_ONCE = 8 << 10;  // floats of currents that stay in the nearest cache beside weights

void share(int tasks, int threads, const std::function<void(int)>& work) {
  std::atomic<int> next{0};
  auto run = [&] {
    for (int i; (i = next.fetch_add(1)) < tasks;) work(i);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < std::min(threads, tasks); ++i) others.emplace_back(run);
  run();
  for (auto& other : others) other.join();
}

void share_pixels(size_t pixels, int threads, const std::function<void(size_t, size_t)>& work) {
  const int parts = (int)std::min<size_t>(pixels, (size_t)threads * 4);
  share(parts, threads, [&](int part) { work(pixels * part / parts, pixels * (part + 1) / parts); });
}

uint32_t count_events(const Conv& c, const uint64_t* image) {
  const int size = words(c.in_channels);
  uint32_t total = 0;
  if (c.window_h == 1 && c.window_w == 1 && c.hop_h == 1 && c.hop_w == 1) {
    for (int i = 0; i < c.in_h * c.in_w * size; ++i) total += __builtin_popcountll(image[i]);
    return total;
  }
  for (int y = 0; y < c.map_h; ++y)
    for (int x = 0; x < c.map_w; ++x)
      for (int wy = 0; wy < c.window_h; ++wy)
        for (int wx = 0; wx < c.window_w; ++wx)
          for (int w = 0; w < size; ++w)
            total += __builtin_popcountll(image[((y * c.hop_h + wy) * c.in_w + x * c.hop_w + wx) * size + w]);
  return total;
}

// Pixels under a kernel, at most, for what reads whole rows of spikes; times the words of each.
size_t line_words(const Layer& l) {
  size_t most = 0;
  for (int k = 0; k < l.n_convs; ++k) {
    const Conv& c = l.convs[k];
    if (!has_events(c, l.out_channels))
      most = std::max(most, (size_t)c.kernel_h * reach(c, l.out_w) * words(c.in_channels));
  }
  return most;
}

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

EXPORT int spikecal_interface() { return 11; }

// The number of floats per vector register in use; asking for fewer than the processor has is for tests.
EXPORT int spikecal_lanes(int most) {
  if (most > 0) kernels = chosen(most);
  return kernels->lanes;
}

EXPORT size_t spikecal_packed_floats(const Conv* c, int out_channels) { return kernels->packed_floats(*c, out_channels); }

EXPORT void spikecal_pack(const Conv* c, int out_channels, const float* weight, const float* height, float* packed) {
  kernels->pack(*c, out_channels, weight, height, packed);
}

// Bits of `pixels` pixels -> floats, 0 or the height of the channel; channels-last, not padded.
EXPORT void spikecal_unpack(const uint64_t* spikes, size_t pixels, int channels, const float* height, float* dense,
                     int threads) {
  share_pixels(pixels, threads, [&](size_t from, size_t to) {
    kernels->unpack(spikes + from * words(channels), to - from, channels, height, dense + from * channels);
  });
}

// How often each neuron fires in T steps: [T][neurons as bits] -> [pixels][channels], times the height.
EXPORT void spikecal_count(const uint64_t* spikes, int T, size_t pixels, int channels, const float* height,
                           float* counts, int threads) {
  const size_t size = words(channels);
  share_pixels(pixels, threads, [&](size_t from, size_t to) {
    kernels->count(spikes + from * size, T, pixels * size, to - from, channels, height, counts + from * channels);
  });
}

// Values [batch][rows][n]: number and sum of the positive ones of a row are added to [rows][columns][2]. The column is that
// of the cell of width top/cells they lie in, by the table of [cells + 1]; the last cell has the top.
EXPORT void spikecal_cells(const float* x, int batch, int rows, size_t n, const double* top, int cells,
                           const int32_t* column_of, int columns, double* totals, int threads) {
  constexpr size_t some = 1024;
  share(rows, threads, [&](int row) {
    double* total = totals + (size_t)row * columns * 2;
    float positive[some];
    for (int b = 0; b < batch; ++b)
      for (size_t from = 0; from < n; from += some) {
        const float* values = x + ((size_t)b * rows + row) * n + from;
        size_t count = 0;
        for (size_t i = 0; i < std::min(some, n - from); ++i) {  // without a branch: half of them are positive
          positive[count] = values[i];
          count += values[i] > 0;
        }
        for (size_t i = 0; i < count; ++i) {
          const double cell = (double)positive[i] * cells / top[row];
          double* at = total + 2 * (size_t)column_of[cell < cells ? (int64_t)cell : (int64_t)cells];
          at[0] += 1;
          at[1] += positive[i];
        }
      }
  });
}

// Costs what its spikes cost.
EXPORT void spikecal_pool(const Pool* p) {
  const size_t size = words(p->channels);
  share(p->N, p->threads, [&](int n) {
    int32_t* counts = p->counts + (size_t)n * p->in_h * p->in_w * p->channels;
    int32_t* most = p->most + (size_t)n * p->out_h * p->out_w * p->channels;
    for (int t = 0; t < p->T; ++t) {
      const size_t image = (size_t)t * p->N + n;
      const uint64_t* bits = p->spikes + image * p->in_h * p->in_w * size;
      uint64_t* fired = p->fired + image * p->out_h * p->out_w * size;
      for (int y = 0; y < p->in_h; ++y)
        for (int x = 0; x < p->in_w; ++x, bits += size)
          for (size_t w = 0; w < size; ++w)
            for (uint64_t left = bits[w]; left; left &= left - 1) {
              const int bit = __builtin_ctzll(left), c = (int)w * 64 + bit;
              const int32_t count = ++counts[((size_t)y * p->in_w + x) * p->channels + c];
              for (int r = p->row_start[y]; r < p->row_start[y + 1]; ++r)
                for (int q = p->column_start[x]; q < p->column_start[x + 1]; ++q) {
                  const size_t pixel = (size_t)p->rows[r] * p->out_w + p->columns[q];
                  if (count <= most[pixel * p->channels + c]) continue;
                  most[pixel * p->channels + c] = count;
                  fired[pixel * size + w] |= (uint64_t)1 << bit;
                }
            }
    }
  });
}

// Floats -> bits: every value but 0 is a spike.
EXPORT void spikecal_pack_spikes(const float* dense, size_t pixels, int channels, uint64_t* spikes) {
  const int size = words(channels);
  for (size_t q = 0; q < pixels; ++q, dense += channels, spikes += size)
    for (int w = 0; w < size; ++w) {
      uint64_t bits = 0;
      for (int c = w * 64; c < std::min(channels, w * 64 + 64); ++c) bits |= (uint64_t)(dense[c] != 0.0f) << c % 64;
      spikes[w] = bits;
    }
}

// Runs one layer over T steps of N images. Returns the number of events listed, or -1 without memory.
EXPORT int64_t spikecal_run(const Layer* l) try {
  const size_t runs = (size_t)l->T * l->N, lists = runs * l->n_convs;
  std::vector<Events> events(lists);
  std::vector<size_t> first_entry(lists + 1), first_offset(lists + 1);
  std::vector<uint32_t> counts(lists);
  auto conv_of = [&](size_t i) -> const Conv& { return l->convs[i % l->n_convs]; };
  share((int)runs, l->threads, [&](int run) {
    for (int k = 0; k < l->n_convs; ++k) {
      const Conv& c = l->convs[k];
      if (has_events(c, l->out_channels))
        counts[(size_t)run * l->n_convs + k] =
            count_events(c, c.spikes + (size_t)run * c.in_h * c.in_w * words(c.in_channels));
    }
  });
  for (size_t i = 0; i < lists; ++i) {
    const Conv& c = conv_of(i);
    const bool is_listed = has_events(c, l->out_channels);
    first_entry[i + 1] = first_entry[i] + counts[i];
    first_offset[i + 1] = first_offset[i] + (is_listed ? (size_t)c.groups * ((size_t)c.map_h * c.map_w + 1) : 0);
  }
  std::unique_ptr<uint32_t[]> entries(new uint32_t[first_entry[lists] + 1]);
  std::unique_ptr<uint32_t[]> offsets(new uint32_t[first_offset[lists] + 1]);
  for (size_t i = 0; i < lists; ++i) events[i] = {entries.get() + first_entry[i], offsets.get() + first_offset[i]};
  share((int)runs, l->threads, [&](int run) {
    for (int k = 0; k < l->n_convs; ++k)
      if (has_events(l->convs[k], l->out_channels))
        kernels->list(l->convs[k], l->out_channels, run / l->N, run % l->N, l->N,
                      events[(size_t)run * l->n_convs + k]);
  });
  const size_t pixels = line_words(*l), row_floats = (size_t)l->out_w * 8 * kernels->lanes;
  const int rows = (int)std::max<size_t>(1, ROWS_AT_ONCE / row_floats);
  // Blocks outermost: the weights of one stay in the cache while all images and steps pass by.
  const int blocks = kernels->blocks(*l), bands = l->N >= l->threads ? 1 : std::min(l->out_h, l->threads);
  share(blocks * l->N * bands, l->threads, [&](int task) {
    const int block = task / (l->N * bands), n = task / bands % l->N, band = task % bands;
    std::vector<float> row(row_floats * rows), masks(pixels * kernels->lanes);
    std::vector<uint64_t> lines(pixels);
    kernels->rows(*l, events.data(), n, block, l->out_h * band / bands, l->out_h * (band + 1) / bands,
                  {row.data(), rows, lines.data(), masks.data()});
  });
  return (int64_t)first_entry[lists];
} catch (const std::bad_alloc&) {
  return -1;
}

}  // extern "C"
