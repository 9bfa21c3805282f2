#include "transport/sha256.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace tfdist {
namespace {

constexpr size_t kBlockBytes = 64;
using State = std::array<uint32_t, 8>;
using Compress = void (*)(State* state, const uint8_t* blocks, size_t count);

constexpr State kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                          0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kRounds = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t Rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

uint32_t LoadBig(const uint8_t* from) {
  return uint32_t{from[0]} << 24 | uint32_t{from[1]} << 16 | uint32_t{from[2]} << 8 | from[3];
}
void StoreBig(uint32_t value, uint8_t* to) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(value >> (24 - 8 * i));
}

// FIPS 180-4, section 6.2.2; the names are those of the standard.
void CompressPortable(State* state, const uint8_t* blocks, size_t count) {
  for (; count > 0; --count, blocks += kBlockBytes) {
    std::array<uint32_t, 64> w;
    for (size_t t = 0; t < 16; ++t) w[t] = LoadBig(blocks + 4 * t);
    for (size_t t = 16; t < 64; ++t) {
      const uint32_t s0 = Rotate(w[t - 15], 7) ^ Rotate(w[t - 15], 18) ^ w[t - 15] >> 3;
      const uint32_t s1 = Rotate(w[t - 2], 17) ^ Rotate(w[t - 2], 19) ^ w[t - 2] >> 10;
      w[t] = s1 + w[t - 7] + s0 + w[t - 16];
    }
    auto [a, b, c, d, e, f, g, h] = *state;
    for (size_t t = 0; t < 64; ++t) {
      const uint32_t sum1 = Rotate(e, 6) ^ Rotate(e, 11) ^ Rotate(e, 25);
      const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRounds[t] + w[t];
      const uint32_t sum0 = Rotate(a, 2) ^ Rotate(a, 13) ^ Rotate(a, 22);
      const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const State add = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) (*state)[i] += add[i];
  }
}

// SHA256_CTX of <openssl/sha.h>, whose layout is part of libcrypto's interface; room to spare.
struct LibcryptoContext {
  State state;
  uint32_t rest[56];
};
using LibcryptoUpdate = int (*)(LibcryptoContext*, const void*, size_t);
LibcryptoUpdate libcrypto_update = nullptr;

// Whole blocks into an empty context go straight to the compression function, many in one call.
void CompressLibcrypto(State* state, const uint8_t* blocks, size_t count) {
  LibcryptoContext context{};
  context.state = *state;
  libcrypto_update(&context, blocks, count * kBlockBytes);
  *state = context.state;
}

// A libcrypto that does not give the bits of the standard (another layout, another function under
// this name) is not used.
bool Agrees() {
  std::array<uint8_t, 5 * kBlockBytes> blocks;
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<uint8_t>(i * 167 + 13);
  State portable = kStart;
  State other = kStart;
  CompressPortable(&portable, blocks.data(), 5);
  CompressLibcrypto(&other, blocks.data(), 2);
  CompressLibcrypto(&other, blocks.data() + 2 * kBlockBytes, 3);
  return portable == other;
}

bool FindLibcrypto() {
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"}) {
    // Never unloaded: the pointer stays.
    void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) continue;
    libcrypto_update = reinterpret_cast<LibcryptoUpdate>(::dlsym(library, "SHA256_Update"));
    if (libcrypto_update != nullptr && Agrees()) return true;
  }
  return false;
}

std::atomic<bool> portable_only{false};

bool UseLibcrypto() {
  static const bool found = FindLibcrypto();
  return found && !portable_only.load(std::memory_order_relaxed);
}

void CompressBlocks(State* state, const uint8_t* blocks, size_t count) {
  (UseLibcrypto() ? CompressLibcrypto : CompressPortable)(state, blocks, count);
}

}  // namespace

const char* Sha256Method() { return UseLibcrypto() ? "libcrypto" : "portable"; }

void UsePortableSha256(bool portable) { portable_only.store(portable); }

Sha256::Sha256() : state_(kStart), block_{} {}

void Sha256::Add(ByteSpan bytes) {
  const uint8_t* data = bytes.data();
  size_t left = bytes.size();
  if (left == 0) return;
  const size_t waiting = total_ % kBlockBytes;
  total_ += left;
  if (waiting > 0) {
    const size_t taken = std::min(left, kBlockBytes - waiting);
    std::memcpy(block_.data() + waiting, data, taken);
    if (waiting + taken < kBlockBytes) return;
    CompressBlocks(&state_, block_.data(), 1);
    data += taken;
    left -= taken;
  }
  const size_t whole = left / kBlockBytes;
  if (whole > 0) CompressBlocks(&state_, data, whole);
  if (left > whole * kBlockBytes) {
    std::memcpy(block_.data(), data + whole * kBlockBytes, left - whole * kBlockBytes);
  }
}

Sha256Digest Sha256::Finish() {
  // A one bit, zeros, and the length in bits: up to two blocks.
  std::array<uint8_t, 2 * kBlockBytes> tail{};
  const size_t waiting = total_ % kBlockBytes;
  std::memcpy(tail.data(), block_.data(), waiting);
  tail[waiting] = 0x80;
  const size_t blocks = waiting + 9 <= kBlockBytes ? 1 : 2;
  const uint64_t bits = total_ * 8;
  StoreBig(static_cast<uint32_t>(bits >> 32), tail.data() + blocks * kBlockBytes - 8);
  StoreBig(static_cast<uint32_t>(bits), tail.data() + blocks * kBlockBytes - 4);
  CompressBlocks(&state_, tail.data(), blocks);
  Sha256Digest digest;
  for (size_t i = 0; i < 8; ++i) StoreBig(state_[i], digest.data() + 4 * i);
  return digest;
}

HmacSha256::HmacSha256(ByteSpan key) {
  std::array<uint8_t, kBlockBytes> padded{};
  if (key.size() > kBlockBytes) {
    Sha256 hash;
    hash.Add(key);
    const Sha256Digest short_key = hash.Finish();
    std::copy(short_key.begin(), short_key.end(), padded.begin());
  } else if (key.size() > 0) {
    std::memcpy(padded.data(), key.data(), key.size());
  }
  for (uint8_t& byte : padded) byte ^= 0x36;
  inner_.Add({padded.data(), padded.size()});
  for (uint8_t& byte : padded) byte ^= 0x36 ^ 0x5c;
  outer_.Add({padded.data(), padded.size()});
}

Sha256Digest HmacSha256::operator()(Span<const ByteSpan> parts) const {
  Sha256 inner = inner_;
  for (const ByteSpan& part : parts) inner.Add(part);
  const Sha256Digest digest = inner.Finish();
  Sha256 outer = outer_;
  outer.Add({digest.data(), digest.size()});
  return outer.Finish();
}

bool EqualBytes(ByteSpan a, ByteSpan b) {
  if (a.size() != b.size()) return false;
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace tfdist
