// Causal convolution: all rows of one sequence, for some channels. CONTRACT.md, section 19.
#pragma once

#include "elements.h"
#include "functions.h"

namespace mha {
namespace {

constexpr int64_t conv_rows = 16;  // that are widened together

// Weights of `count` channels as rows of channels.
MHA_INLINE void transpose_weights(const float *weights, int64_t kernel_size, int64_t count,
                                  float *to) {
  int64_t c = 0;
  for (; kernel_size == 4 && c + static_cast<int64_t>(Vector::size) <= count; c += Vector::size) {
    Vector column[4];
    transpose_four(weights + c * 4, 4, column);
    MHA_EACH(j, 4) store(to + j * conv_channels + c, column[j]);
  }
  for (; c < count; ++c) {
    for (int64_t j = 0; j < kernel_size; ++j)
      to[j * conv_channels + c] = weights[c * kernel_size + j];
  }
}

// Copies floats, or clears them where there are none.
MHA_INLINE void copy_floats(const float *from, int64_t count, float *to) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  if (from)
    MHA_MEMCPY(to, from, bytes);
  else
    MHA_MEMSET(to, 0, bytes);
}

// The kernels' `convolve`. The rows before the first one, and then the last ones that it has, lie
// before those that are widened. Columns after the last channel may hold anything.
inline void convolve(const Convolution &call, const SequenceRows &rows, int64_t channel) {
  const int64_t before = call.kernel_size - 1, left = call.channels - channel,
                count = left < conv_channels ? left : conv_channels;
  const bool is_direct = call.output.storage == Storage::f32 && count % Vector::size == 0;
  alignas(64) float weights[max_conv_kernel * conv_channels];
  alignas(64) float x[(max_conv_kernel - 1 + conv_rows) * conv_channels];
  alignas(64) float bias[conv_channels], numbers[conv_channels];
  transpose_weights(call.weights + channel * call.kernel_size, call.kernel_size, count, weights);
  const int64_t of_state = rows.sequence * before * call.channels + channel;
  copy_floats(call.bias ? call.bias + channel : nullptr, count, bias);
  for (int64_t j = 0; j < before; ++j)
    copy_floats(call.state ? call.state + of_state + j * call.channels : nullptr, count,
                x + j * conv_channels);
  for (int64_t t = 0; t < rows.count; t += conv_rows) {
    const int64_t here = rows.count - t < conv_rows ? rows.count - t : conv_rows;
    for (int64_t i = 0; i < here; ++i) {
      const int64_t from =
          rows.in_arrays * call.x.batch_stride + (rows.first + t + i) * call.x.row_stride + channel;
      widen(call.x.storage, element_at(call.x.base, call.x.storage, from), count,
            x + (before + i) * conv_channels);
    }
    for (int64_t i = 0; i < here; ++i) {
      const int64_t at = rows.in_arrays * call.output.batch_stride +
                         (rows.first + t + i) * call.output.row_stride + channel;
      void *const output = element_at(call.output.base, call.output.storage, at);
      float *const to = is_direct ? static_cast<float *>(output) : numbers;
      for (int64_t c = 0; c < count; c += Vector::size) {
        Vector y = load(bias + c);
        for (int64_t j = 0; j <= before; ++j)
          y = mul_add(load(weights + j * conv_channels + c), load(x + (i + j) * conv_channels + c),
                      y);
        if (call.has_silu) y = y * sigmoid_of(canonical_nan(y));
        store(to + c, canonical(y));
      }
      if (!is_direct) write_row(call.output.storage, numbers, count, output);
    }
    for (int64_t j = 0; j < before; ++j)
      copy_floats(x + (here + j) * conv_channels, count, x + j * conv_channels);
  }
  for (int64_t j = 0; call.state_out && j < before; ++j) {
    for (int64_t c = 0; c < count; ++c)
      call.state_out[of_state + j * call.channels + c] = canonical(x[j * conv_channels + c]);
  }
}

}  // namespace
}  // namespace mha
