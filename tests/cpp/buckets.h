// Groups of gradients for the tests: registering one, submitting its buckets, reading counters.
#ifndef TFDIST_TESTS_CPP_BUCKETS_H_
#define TFDIST_TESTS_CPP_BUCKETS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ranks.h"

namespace tfdist {

// The id of a group of one variable; fails the test when the ranks do not agree.
std::string Register(Runtime& runtime, const std::string& variable, uint32_t set = 0);

std::unique_ptr<Request> Bucket(const std::string& group, int bucket, int count,
                                std::vector<float>* data, uint32_t set = 0);

int64_t Counter(const std::string& json, const std::string& name);

bool Contains(const std::string& text, const std::string& part);

#define CHECK_CONTAINS(text, part) CHECK_EQ_IN(tfdist::Contains((text), (part)), true, (text))

}  // namespace tfdist

#endif  // TFDIST_TESTS_CPP_BUCKETS_H_
