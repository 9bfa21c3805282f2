#include "transport/crc32c.h"

#include <array>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tfdist {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;

// tables[k][b]: the register after byte b and then k zero bytes, from an empty register. Eight of
// them take eight bytes in one step (M. E. Kounavis, F. L. Berry, Novel Table Lookup-Based
// Algorithms for High-Performance CRC Generation, IEEE Trans. Computers 57, 2008).
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

// All Extend functions continue the CRC register `crc`, without the initial and final inversion.
uint32_t ExtendByTable(uint32_t crc, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, sizeof(word));
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xff];
  return crc;
}

#if defined(__x86_64__) || (defined(__aarch64__) && defined(__linux__))

// The instruction takes eight bytes and has a latency of 3 cycles, so three streams keep it busy.
// They are joined by running the first registers over as many zero bytes as follow them, which is
// linear in the register's bits: four look-ups (Gopal et al., Fast CRC Computation for iSCSI
// Polynomial Using CRC32 Instruction, Intel 2011).
constexpr size_t kStreamBytes = 1024;

struct Skip {
  std::array<std::array<uint32_t, 256>, 4> tables{};

  Skip() {
    std::array<uint32_t, 32> of_bit;
    const uint8_t zeros[64] = {};
    for (size_t bit = 0; bit < 32; ++bit) {
      of_bit[bit] = uint32_t{1} << bit;
      for (size_t done = 0; done < kStreamBytes; done += sizeof(zeros)) {
        of_bit[bit] = ExtendByTable(of_bit[bit], zeros, sizeof(zeros));
      }
    }
    for (size_t k = 0; k < 4; ++k) {
      for (uint32_t byte = 0; byte < 256; ++byte) {
        for (size_t bit = 0; bit < 8; ++bit) {
          if ((byte >> bit & 1) != 0) tables[k][byte] ^= of_bit[8 * k + bit];
        }
      }
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return tables[0][crc & 0xff] ^ tables[1][crc >> 8 & 0xff] ^ tables[2][crc >> 16 & 0xff] ^
           tables[3][crc >> 24];
  }
};

#if defined(__x86_64__)
#define TFDIST_CRC_TARGET __attribute__((target("sse4.2")))
TFDIST_CRC_TARGET inline uint32_t Step(uint32_t crc, const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
bool HasInstruction() { return __builtin_cpu_supports("sse4.2") != 0; }
constexpr const char* kInstruction = "sse4.2";
#else
#define TFDIST_CRC_TARGET __attribute__((target("+crc")))
TFDIST_CRC_TARGET inline uint32_t Step(uint32_t crc, const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return __crc32cd(crc, word);
}
bool HasInstruction() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
constexpr const char* kInstruction = "arm";
#endif

TFDIST_CRC_TARGET uint32_t ExtendByInstruction(uint32_t crc, const uint8_t* data, size_t bytes) {
  static const Skip skip;
  for (; bytes >= 3 * kStreamBytes; data += 3 * kStreamBytes, bytes -= 3 * kStreamBytes) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t at = 0; at < kStreamBytes; at += 8) {
      crc = Step(crc, data + at);
      second = Step(second, data + kStreamBytes + at);
      third = Step(third, data + 2 * kStreamBytes + at);
    }
    crc = skip(skip(crc) ^ second) ^ third;
  }
  for (; bytes >= 8; data += 8, bytes -= 8) crc = Step(crc, data);
  return ExtendByTable(crc, data, bytes);
}

#endif

#if defined(__x86_64__)

// x^exponent modulo the polynomial, as a factor of a carry-less product: bit 63 - e stands for x^e.
constexpr uint64_t PowerOfX(int exponent) {
  uint32_t power = 0x80000000;
  for (int i = 0; i < exponent; ++i) power = (power >> 1) ^ ((power & 1) != 0 ? kPolynomial : 0);
  return static_cast<uint64_t>(power) << 32;
}

// Folding (Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction,
// Intel 2009): 16 bytes L x^64 + H, followed by `bits` bits, are congruent to L x^(64 + bits) +
// H x^bits, with the powers taken modulo the polynomial. The product of two such numbers is shifted
// by one bit against the 16 bytes, hence the exponents minus 1.
constexpr uint64_t FactorOfL(int bits) { return PowerOfX(64 + bits - 1); }
constexpr uint64_t FactorOfH(int bits) { return PowerOfX(bits - 1); }

#define TFDIST_FOLD_TARGET __attribute__((target("pclmul,sse4.2")))
#define TFDIST_FOLD_AVX2_TARGET __attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))
#define TFDIST_FOLD_AVX512_TARGET __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.2")))
constexpr int kLanes = 4;  // registers, so that their products overlap

// Folds the 16 bytes `x` into `next`, which begins `kBits` bits after the beginning of `x`.
template <int kBits>
TFDIST_FOLD_TARGET inline __m128i Fold(__m128i x, __m128i next) {
  constexpr auto l = static_cast<int64_t>(FactorOfL(kBits));
  constexpr auto h = static_cast<int64_t>(FactorOfH(kBits));
  const __m128i factors = _mm_set_epi64x(h, l);
  const __m128i of_l = _mm_clmulepi64_si128(x, factors, 0x00);
  const __m128i of_h = _mm_clmulepi64_si128(x, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(of_l, next), of_h);
}

// Twice 16 bytes at once.
template <int kBits>
TFDIST_FOLD_AVX2_TARGET inline __m256i Fold(__m256i x, __m256i next) {
  constexpr auto l = static_cast<int64_t>(FactorOfL(kBits));
  constexpr auto h = static_cast<int64_t>(FactorOfH(kBits));
  const __m256i factors = _mm256_set_epi64x(h, l, h, l);
  const __m256i of_l = _mm256_clmulepi64_epi128(x, factors, 0x00);
  const __m256i of_h = _mm256_clmulepi64_epi128(x, factors, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(of_l, next), of_h);
}

// Four times.
template <int kBits>
TFDIST_FOLD_AVX512_TARGET inline __m512i Fold(__m512i x, __m512i next) {
  constexpr auto l = static_cast<int64_t>(FactorOfL(kBits));
  constexpr auto h = static_cast<int64_t>(FactorOfH(kBits));
  const __m512i factors = _mm512_set_epi64(h, l, h, l, h, l, h, l);
  constexpr int kXor = 0x96;  // of all three
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, factors, 0x00),
                                   _mm512_clmulepi64_epi128(x, factors, 0x11), next, kXor);
}

// The CRC register after 16 bytes into which all bytes before them were folded.
TFDIST_FOLD_TARGET inline uint32_t RegisterAfter(__m128i x) {
  const auto first = static_cast<uint64_t>(_mm_extract_epi64(x, 0));
  const auto second = static_cast<uint64_t>(_mm_extract_epi64(x, 1));
  return static_cast<uint32_t>(_mm_crc32_u64(_mm_crc32_u64(0, first), second));
}

TFDIST_FOLD_AVX2_TARGET uint32_t ExtendByAvx2(uint32_t crc, const uint8_t* data, size_t bytes) {
  constexpr size_t kFolded = kLanes * sizeof(__m256i);
  if (bytes >= 2 * kFolded) {
    __m256i x[kLanes];
    std::memcpy(x, data, kFolded);
    x[0] = _mm256_xor_si256(x[0], _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, static_cast<int>(crc)));
    for (data += kFolded, bytes -= kFolded; bytes >= kFolded; data += kFolded, bytes -= kFolded) {
      const auto* next = reinterpret_cast<const __m256i*>(data);
      for (int i = 0; i < kLanes; ++i) {
        x[i] = Fold<8 * kFolded>(x[i], _mm256_loadu_si256(next + i));
      }
    }
    for (int i = 1; i < kLanes; ++i) x[i] = Fold<256>(x[i - 1], x[i]);
    __m128i halves[2];
    std::memcpy(halves, &x[kLanes - 1], sizeof(halves));
    crc = RegisterAfter(Fold<128>(halves[0], halves[1]));
  }
  return ExtendByInstruction(crc, data, bytes);
}

TFDIST_FOLD_AVX512_TARGET uint32_t ExtendByAvx512(uint32_t crc, const uint8_t* data, size_t bytes) {
  constexpr size_t kFolded = kLanes * sizeof(__m512i);
  if (bytes >= 2 * kFolded) {
    __m512i x[kLanes];
    std::memcpy(x, data, kFolded);
    const __m128i before = _mm_cvtsi32_si128(static_cast<int>(crc));
    x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(before));
    for (data += kFolded, bytes -= kFolded; bytes >= kFolded; data += kFolded, bytes -= kFolded) {
      for (int i = 0; i < kLanes; ++i) {
        x[i] = Fold<8 * kFolded>(x[i], _mm512_loadu_si512(data + i * sizeof(__m512i)));
      }
    }
    for (int i = 1; i < kLanes; ++i) x[i] = Fold<512>(x[i - 1], x[i]);
    __m128i parts[4];
    std::memcpy(parts, &x[kLanes - 1], sizeof(parts));
    for (int i = 1; i < 4; ++i) parts[i] = Fold<128>(parts[i - 1], parts[i]);
    crc = RegisterAfter(parts[3]);
  }
  return ExtendByInstruction(crc, data, bytes);
}

bool HasProducts() {
  return HasInstruction() && __builtin_cpu_supports("pclmul") != 0 &&
         __builtin_cpu_supports("vpclmulqdq") != 0;
}
bool HasAvx2() { return HasProducts() && __builtin_cpu_supports("avx2") != 0; }
bool HasAvx512() { return HasProducts() && __builtin_cpu_supports("avx512f") != 0; }

#endif

std::vector<Crc32cMethod> Methods() {
  std::vector<Crc32cMethod> methods;
#if defined(__x86_64__)
  if (HasAvx512()) methods.push_back({"avx512", ExtendByAvx512});
  if (HasAvx2()) methods.push_back({"avx2", ExtendByAvx2});
#endif
#if defined(__x86_64__) || (defined(__aarch64__) && defined(__linux__))
  if (HasInstruction()) methods.push_back({kInstruction, ExtendByInstruction});
#endif
  methods.push_back({"table", ExtendByTable});
  return methods;
}

}  // namespace

const std::vector<Crc32cMethod>& Crc32cMethods() {
  static const std::vector<Crc32cMethod> methods = Methods();
  return methods;
}

uint32_t ExtendCrc32c(uint32_t crc, ByteSpan bytes) {
  static const auto extend = Crc32cMethods()[0].extend;
  return ~extend(~crc, bytes.data(), bytes.size());
}

uint32_t Crc32c(ByteSpan bytes) { return ExtendCrc32c(0, bytes); }

}  // namespace tfdist
