// CRC-32C, SHA-256 and HMAC against the vectors of their standards, every method against the other.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "transport/crc32c.h"
#include "transport/sha256.h"

namespace tfdist {
namespace {

std::vector<uint8_t> RandomBytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(count);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

ByteSpan View(const std::vector<uint8_t>& bytes) { return {bytes.data(), bytes.size()}; }

std::string Hex(const Sha256Digest& digest) {
  std::string out;
  for (uint8_t byte : digest) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

std::string Sha256Of(const std::string& text) {
  Sha256 hash;
  hash.Add(AsBytes(text));
  return Hex(hash.Finish());
}

// Runs `body` with the portable code, then with what the machine has.
template <typename Body>
void WithEachMethod(Body body) {
  for (bool portable : {true, false}) {
    UsePortableSha256(portable);
    body();
  }
  std::printf("       SHA-256 by %s\n", Sha256Method());
}

uint32_t CrcBy(const Crc32cMethod& method, ByteSpan bytes) {
  return ~method.extend(~uint32_t{0}, bytes.data(), bytes.size());
}

TEST(crc_of_the_standards_examples) {
  // RFC 3720, appendix B.4, and the usual check value.
  std::vector<uint8_t> ascending(32);
  for (size_t i = 0; i < 32; ++i) ascending[i] = static_cast<uint8_t>(i);
  const std::vector<uint8_t> descending(ascending.rbegin(), ascending.rend());
  const std::string digits = "123456789";
  for (const Crc32cMethod& method : Crc32cMethods()) {
    std::printf("       CRC-32C by %s\n", method.name);
    const auto crc = [&method](ByteSpan bytes) { return CrcBy(method, bytes); };
    CHECK_EQ(crc(View(std::vector<uint8_t>(32, 0))), 0x8a9136aau);
    CHECK_EQ(crc(View(std::vector<uint8_t>(32, 0xff))), 0x62a8ab43u);
    CHECK_EQ(crc(View(ascending)), 0x46dd794eu);
    CHECK_EQ(crc(View(descending)), 0x113fdb5cu);
    CHECK_EQ(crc(AsBytes(digits)), 0xe3069283u);
    CHECK_EQ(crc({}), 0u);
  }
  CHECK_EQ(Crc32c(AsBytes(digits)), 0xe3069283u);
}

TEST(crc_is_the_same_by_every_method) {
  const std::vector<uint8_t> bytes = RandomBytes(20000, 1);
  const Crc32cMethod& table = Crc32cMethods().back();
  CHECK_EQ(std::string(table.name), "table");
  std::vector<size_t> sizes = {3071, 3072, 3073, 6144, 9216 + 17, 19990};
  for (size_t size = 0; size <= 1100; ++size) sizes.push_back(size);
  for (const Crc32cMethod& method : Crc32cMethods()) {
    for (size_t size : sizes) {
      for (size_t offset : {0, 1, 3}) {
        const ByteSpan part(bytes.data() + offset, size);
        const std::string what = std::string(method.name) + ", " + std::to_string(size);
        CHECK_EQ_IN(CrcBy(method, part), CrcBy(table, part), what);
      }
    }
  }
}

TEST(crc_of_parts_is_that_of_the_whole) {
  const std::vector<uint8_t> bytes = RandomBytes(5000, 4);
  for (size_t cut : {0, 1, 511, 512, 700, 4999, 5000}) {
    const uint32_t first = Crc32c({bytes.data(), cut});
    CHECK_EQ(ExtendCrc32c(first, {bytes.data() + cut, bytes.size() - cut}), Crc32c(View(bytes)));
  }
}

TEST(sha256_of_the_standards_examples) {
  WithEachMethod([] {
    CHECK_EQ(Sha256Of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK_EQ(Sha256Of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK_EQ(Sha256Of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
             "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK_EQ(Sha256Of(std::string(1000000, 'a')),
             "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  });
}

TEST(hmac_of_the_standards_examples) {
  // RFC 4231, cases 1, 2, 6 (a key longer than a block).
  WithEachMethod([] {
    const std::vector<uint8_t> key1(20, 0x0b);
    CHECK_EQ(Hex(HmacSha256(View(key1))({AsBytes("Hi There")})),
             "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    const std::string key2 = "Jefe";
    CHECK_EQ(Hex(HmacSha256(AsBytes(key2))({AsBytes("what do ya "), AsBytes("want for nothing?")})),
             "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    const std::vector<uint8_t> key6(131, 0xaa);
    CHECK_EQ(Hex(HmacSha256(View(key6))(
                 {AsBytes("Test Using Larger Than Block-Size Key - Hash Key First")})),
             "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
  });
}

TEST(sha256_does_not_depend_on_how_the_bytes_come) {
  const std::vector<uint8_t> bytes = RandomBytes(1000, 2);
  std::vector<std::string> digests;
  WithEachMethod([&] {
    for (size_t step : {1, 3, 55, 63, 64, 65, 128, 1000}) {
      Sha256 hash;
      for (size_t at = 0; at < bytes.size(); at += step) {
        hash.Add({bytes.data() + at, std::min(step, bytes.size() - at)});
      }
      digests.push_back(Hex(hash.Finish()));
    }
  });
  for (const std::string& digest : digests) CHECK_EQ(digest, digests[0]);
}

TEST(equal_bytes) {
  const std::vector<uint8_t> bytes = RandomBytes(32, 3);
  std::vector<uint8_t> other = bytes;
  CHECK(EqualBytes(View(bytes), View(other)));
  other[31] ^= 1;
  CHECK(!EqualBytes(View(bytes), View(other)));
  CHECK(!EqualBytes(View(bytes), {bytes.data(), 31}));
}

}  // namespace
}  // namespace tfdist

TEST_MAIN()
