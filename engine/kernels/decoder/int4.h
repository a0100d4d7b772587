// int4: 32 weights of an output are scale * (value + shift), the value one of 16 that a nibble stands for. The values are
// those of ggml's IQ4_NL, dense near zero as weights are; a shift of their own lets a group be lopsided. 4.5 bits a weight:
// a scale has 3 bits of exponent, above that of its output, and 5 of fraction; a shift is a byte.
#pragma once
#include <algorithm>
#include <cmath>

#include "vectors.h"

namespace spillway {

constexpr int GROUP = 32;                       // inputs
alignas(16) constexpr uint8_t NIBBLE_VALUES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                   129, 141, 153, 166, 181, 197, 217, 241};  // 128 more than they are
constexpr int32_t SHIFT_ZERO = 128;  // the byte of a shift of 0
constexpr float MOST_SHIFT = 127;
constexpr int EXPONENTS = 8, FRACTION = 5;  // exponents of an output's scales; bits

// The values of nibbles that stand in bytes.
INLINED I nibble_values(I codes) {
#if defined(__AVX512BW__)
  const __m512i values = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)NIBBLE_VALUES));
  UNROLLED(i, PARTS) codes.part[i] = (I::Part)_mm512_shuffle_epi8(values, (__m512i)codes.part[i]);
#elif defined(__AVX2__)
  const __m256i values = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)NIBBLE_VALUES));
  UNROLLED(i, PARTS) codes.part[i] = (I::Part)_mm256_shuffle_epi8(values, (__m256i)codes.part[i]);
#else
  uint8_t each[64];
  store(each, codes);
  for (uint8_t& byte : each) byte = NIBBLE_VALUES[byte];
  codes = load<I>(each);
#endif
  return codes;
}

// A scale as it is kept: `exponent` is that of the output's least, as fp32 has it.
INLINED F int4_scale(I exponent, I scale) { return (F)((exponent << 23) + (scale << (23 - FRACTION))); }
inline float int4_scale(int exponent, int scale) {
  const int32_t kept = (exponent << 23) + (scale << (23 - FRACTION));
  float x;
  std::memcpy(&x, &kept, 4);
  return x;
}

// A group's weights are nearest to slope * value + offset; a slope of 0: all are zero.
struct Int4Line {
  float slope = 0, offset = 0;
};

// The values nearest to 16 weights on a line, as numbers around zero; their codes.
constexpr float value(int code) { return float(NIBBLE_VALUES[code] - 128); }
constexpr float bound(int code) { return (value(code - 1) + value(code)) / 2; }  // from the code below
inline F nearest_values(F at) {
  F low = splat(value(0)), high = F{};  // two sums, since each waits for the one before
  for (int c = 1; c < 16; c += 2) {
    low += pick(at > splat(bound(c)), splat(value(c) - value(c - 1)), F{});
    if (c + 1 < 16) high += pick(at > splat(bound(c + 1)), splat(value(c + 1) - value(c)), F{});
  }
  return low + high;
}
inline I nearest_codes(F at) {
  I code = I{};
  for (int c = 1; c < 16; ++c) code -= at > splat(bound(c));
  return code;
}

// The line of least squares among those that four starts lead to: from the whole range of the weights, or cut at an end.
inline Int4Line fit_int4(const float* values) {
  constexpr float CUT = 0.065f, RANGE = float(NIBBLE_VALUES[15] - NIBBLE_VALUES[0]);
  constexpr int STARTS = 4, ROUNDS = 3;
  F w[2] = {load<F>(values), load<F>(values + 16)};
  const float high = largest(max(w[0], w[1])), low = -largest(max(-w[0], -w[1]));
  const float most = std::max(high, -low), range = (high - low) / most;
  if (!(most > 1e-30f)) return {};
  if (!(range > 1e-6f)) return {most / MOST_SHIFT, high};
  const float inverse = 1 / most;  // so that squares neither vanish nor overflow
  for (F& each : w) each *= splat(inverse);
  const float mean = sum(w[0] + w[1]) / GROUP;
  float slope[STARTS], offset[STARTS], gain[STARTS];
  for (int s = 0; s < STARTS; ++s) {
    const float first = low * inverse + (s & 1 ? CUT * range : 0), last = high * inverse - (s & 2 ? CUT * range : 0);
    slope[s] = (last - first) / RANGE, offset[s] = first - slope[s] * value(0);
  }
  for (int round = 0; round < ROUNDS; ++round)
    for (int s = 0; s < STARTS; ++s) {  // which do not wait for each other
      const F by = splat(1 / slope[s]), from = splat(offset[s]);
      F v[2] = {nearest_values((w[0] - from) * by), nearest_values((w[1] - from) * by)};
      const float middle = sum(v[0] + v[1]) / GROUP;
      for (F& each : v) each -= splat(middle);
      const float own = sum(v[0] * v[0] + v[1] * v[1]), both = sum(v[0] * w[0] + v[1] * w[1]);
      if (own > 0) slope[s] = both / own;
      offset[s] = mean - slope[s] * middle, gain[s] = both * slope[s];
    }
  const auto best = std::max_element(gain, gain + STARTS) - gain;
  const float found = slope[best] * most, by = offset[best] * most;
  return {std::max(found, std::fabs(by) / MOST_SHIFT), by};
}

// The exponent of an output's least scale, from its lines: the largest slope has the largest exponent.
inline int int4_exponent(const Int4Line* lines, int64_t count) {
  float most = 0;
  for (int64_t g = 0; g < count; ++g) most = std::max(most, lines[g].slope);
  return std::max(1, (most > 0 ? std::ilogb(most) + 127 : 0) - (EXPONENTS - 1));
}

struct Int4Head {
  uint8_t scale, shift;
};

// Write a group's 32 codes, and return its scale and shift; the codes are of these as they are kept.
inline Int4Head int4_codes(const float* values, Int4Line line, int exponent, uint8_t* codes) {
  if (line.slope == 0) {  // the value 1, and a shift of -1
    std::fill(codes, codes + GROUP, uint8_t(8));
    return {0, SHIFT_ZERO - 1};
  }
  const float unit = int4_scale(exponent, 0), least_slope = std::max(line.slope, unit);
  int32_t kept;
  std::memcpy(&kept, &least_slope, 4);
  kept = (kept - (exponent << 23) + (1 << (22 - FRACTION))) >> (23 - FRACTION);
  const auto scale = uint8_t(std::min(255, kept));
  const float slope = int4_scale(exponent, scale);
  const float shift = std::nearbyint(std::max(-MOST_SHIFT, std::min(MOST_SHIFT, line.offset / slope)));
  const F by = splat(1 / slope);
  for (int i = 0; i < GROUP; i += 16) {
    const I found = nearest_codes(load<F>(values + i) * by - splat(shift));
    for (int k = 0; k < 16; ++k) codes[i + k] = uint8_t(found[k]);
  }
  return {scale, uint8_t(int(shift) + SHIFT_ZERO)};
}

}  // namespace spillway
