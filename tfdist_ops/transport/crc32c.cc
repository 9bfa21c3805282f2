#include "transport/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace tfdist {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;

// tables[k][b]: the register after byte b and then k zero bytes, from an empty register. Eight of
// them take eight bytes in one step.
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

// All of these continue a register `crc`, without the first and last inversion.
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

// The instruction takes eight bytes and answers three cycles later, so three streams keep it busy.
// They are joined by running the first registers over as many zero bytes as follow them, which is
// linear in the register's bits: four look-ups.
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

#else
bool HasInstruction() { return false; }
constexpr const char* kInstruction = "table";
uint32_t ExtendByInstruction(uint32_t crc, const uint8_t* data, size_t bytes) {
  return ExtendByTable(crc, data, bytes);
}
#endif

bool UseInstruction() {
  static const bool use = HasInstruction();
  return use;
}

}  // namespace

uint32_t ExtendCrc32c(uint32_t crc, ByteSpan bytes) {
  const auto extend = UseInstruction() ? ExtendByInstruction : ExtendByTable;
  return ~extend(~crc, bytes.data(), bytes.size());
}

uint32_t Crc32c(ByteSpan bytes) { return ExtendCrc32c(0, bytes); }

uint32_t Crc32cByTable(ByteSpan bytes) {
  return ~ExtendByTable(~uint32_t{0}, bytes.data(), bytes.size());
}

const char* Crc32cMethod() { return UseInstruction() ? kInstruction : "table"; }

}  // namespace tfdist
