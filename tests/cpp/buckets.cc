#include "buckets.h"

#include <cstdlib>

namespace tfdist {

std::string Register(Runtime& runtime, const std::string& variable, uint32_t set) {
  std::vector<uint8_t> present = {1};
  std::string id;
  CHECK_OK(runtime.RegisterGroup(set, variable + "\nop=sum", &present, 0, &id));
  return id;
}

std::unique_ptr<Request> Bucket(const std::string& group, int bucket, int count,
                                std::vector<float>* data, uint32_t set) {
  auto request =
      MakeRequest(CollectiveKind::kAllreduce,
                  "g." + group.substr(0, 8) + "." + std::to_string(bucket), DType::kFloat32);
  AddTensor(request.get(), data->data(), data->data(), {static_cast<int64_t>(data->size())});
  request->group = group;
  request->bucket_index = bucket;
  request->bucket_count = count;
  request->info.set = set;
  return request;
}

int64_t Counter(const std::string& json, const std::string& name) {
  const size_t at = json.find("\"" + name + "\": ");
  CHECK_EQ_IN(at != std::string::npos, true, name + " in " + json);
  return std::strtoll(json.c_str() + at + name.size() + 4, nullptr, 10);
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace tfdist
