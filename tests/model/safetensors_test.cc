#include "model/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tests/model/scratch.h"

namespace efla {
namespace {

using nlohmann::json;

// A file's bytes at an address aligned to 8, as a mapping would have them, and with nothing readable behind
// them for a sanitizer to miss.
class FileBytes {
 public:
  explicit FileBytes(const std::string& bytes) : words_((bytes.size() + 7) / 8 + 1), size_(bytes.size()) {
    std::memcpy(words_.data(), bytes.data(), bytes.size());
  }
  std::string_view view() const { return {reinterpret_cast<const char*>(words_.data()), size_}; }

 private:
  std::vector<uint64_t> words_;
  size_t size_;
};

std::string Assemble(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &size, 8);
  return file + header + data;
}

json GoodHeader() {
  return {{"__metadata__", {{"format", "pt"}}},
          {"a", {{"dtype", "F32"}, {"shape", {2, 3}}, {"data_offsets", {0, 24}}}},
          {"b", {{"dtype", "BF16"}, {"shape", {4}}, {"data_offsets", {24, 32}}}},
          {"c", {{"dtype", "F16"}, {"shape", {1, 1, 4}}, {"data_offsets", {32, 40}}}}};
}

std::string Pad(std::string header) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

std::string GoodFile() { return Assemble(Pad(GoodHeader().dump()), std::string(40, '\1')); }

// All of a value's bits that no finite value has.
template <typename Bits>
void ExpectFound(DType dtype, Bits infinity, Bits largest) {
  constexpr size_t kElements = 10'007;
  for (const size_t place : {size_t{0}, size_t{4095}, size_t{4096}, kElements - 1, kElements}) {
    std::vector<Bits> bits(kElements, largest);
    for (size_t at = place; at < kElements; at += 3000) {
      bits[at] = at % 2 == 0 ? infinity : static_cast<Bits>(~Bits{0});
    }
    const TensorInfo tensor{
        .name = "w", .dtype = dtype, .shape = {static_cast<int64_t>(kElements)}, .data = bits.data()};
    const absl::Status status = CheckFinite(tensor);
    if (place == kElements) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << place;
      EXPECT_EQ(status.message(), "tensor w: element " + std::to_string(place) + " is NaN or infinite");
    }
  }
}

TEST(SafetensorsTest, FindsTheFirstThatIsNotFinite) {
  ExpectFound<uint32_t>(DType::kF32, 0x7F800000, 0x7F7FFFFF);
  ExpectFound<uint16_t>(DType::kF16, 0x7C00, 0xFBFF);
  ExpectFound<uint16_t>(DType::kBF16, 0xFF80, 0x7F7F);
}

TEST(SafetensorsTest, ReadsShapesDtypesAndPlaces) {
  const FileBytes file(GoodFile());
  const auto tensors = ParseSafetensors(file.view(), "f");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 3u);
  EXPECT_EQ((*tensors)[0].name, "a");
  EXPECT_EQ((*tensors)[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ((*tensors)[1].dtype, DType::kBF16);
  EXPECT_EQ((*tensors)[2].dtype, DType::kF16);
  EXPECT_EQ((*tensors)[2].bytes(), 8);
  EXPECT_EQ(static_cast<const char*>((*tensors)[2].data) + 8, file.view().data() + file.view().size());
}

struct Corruption {
  const char* what;
  std::string file;
  const char* message;  // a part of it
};

std::string Changed(const std::function<void(json&)>& change, size_t data_bytes = 40) {
  json header = GoodHeader();
  change(header);
  return Assemble(Pad(header.dump()), std::string(data_bytes, '\1'));
}

std::vector<Corruption> Corruptions() {
  const std::string good = GoodFile();
  const std::string header = Pad(GoodHeader().dump());
  const auto with_length = [&](uint64_t length) {
    std::string file = good;
    std::memcpy(file.data(), &length, 8);
    return file;
  };
  return {
      {"empty file", "", "0 bytes"},
      {"no whole length", "1234567", "7 bytes"},
      {"length beyond the file", with_length(good.size()), "in a file of"},
      {"length of all ones", with_length(~uint64_t{0}), "at most 100000000"},
      {"header over the limit", with_length(100'000'001), "at most 100000000"},
      {"header of no bytes", Assemble("", ""), "not JSON"},
      {"header cut", with_length(header.size() - 40), "not JSON"},
      {"header not JSON", Assemble("{\"a\":    ", ""), "not JSON"},
      {"header an array", Assemble("[1,2,3] ", ""), "object is needed"},
      {"header with binary bytes", Assemble(std::string("{\"\xFF\":1} ", 9), ""), "not JSON"},
      {"data cut", good.substr(0, good.size() - 1), "39 bytes of data"},
      {"data too long", good + "x", "41 bytes of data"},
      {"no data at all", Assemble(header, ""), "holds 0 bytes"},
      {"end before begin", Changed([](json& h) {
         h["b"]["data_offsets"] = {32, 24};
       }),
       "before they begin"},
      {"offset beyond the file", Changed([](json& h) {
         h["c"]["data_offsets"] = {1000, 1008};
       }),
       "holds 40 bytes"},
      {"huge offsets", Changed([](json& h) {
         h["c"]["data_offsets"] = {18446744073709551608u, 18446744073709551615u};
       }),
       "data_offsets is"},
      {"negative offset", Changed([](json& h) {
         h["c"]["data_offsets"] = {-8, 0};
       }),
       "data_offsets is"},
      {"fractional offset", Changed([](json& h) {
         h["c"]["data_offsets"] = {32.5, 40};
       }),
       "data_offsets is"},
      {"one offset", Changed([](json& h) { h["c"]["data_offsets"] = json::array({32}); }), "data_offsets is"},
      {"three offsets", Changed([](json& h) {
         h["c"]["data_offsets"] = {32, 36, 40};
       }),
       "data_offsets is"},
      {"offsets missing", Changed([](json& h) { h["c"].erase("data_offsets"); }), "data_offsets is missing"},
      {"overlap", Changed([](json& h) {
         h["c"]["data_offsets"] = {28, 36};
       }),
       "overlap"},
      {"gap",
       Changed(
           [](json& h) {
             h["c"]["data_offsets"] = {36, 44};
           },
           44),
       "gaps"},
      {"gap at the beginning", Changed([](json& h) { h.erase("a"); }), "gaps"},
      {"data that no tensor covers", Changed([](json& h) { h.erase("c"); }), "tensors end at 32"},
      {"two tensors at one place", Changed([](json& h) { h["d"] = h["c"]; }), "overlap"},
      {"shape larger than the bytes", Changed([](json& h) {
         h["a"]["shape"] = {2, 4};
       }),
       "takes 32"},
      {"shape smaller than the bytes", Changed([](json& h) { h["a"]["shape"] = {2}; }), "takes 8"},
      {"shape overflow", Changed([](json& h) {
         h["a"]["shape"] = {int64_t{1} << 40, int64_t{1} << 40};
       }),
       "larger than any file"},
      {"shape overflow to the right size", Changed([](json& h) {
         h["a"]["shape"] = {6, (int64_t{1} << 62) + 1};
       }),
       "larger than any file"},
      {"negative shape", Changed([](json& h) {
         h["a"]["shape"] = {-2, -3};
       }),
       "shape holds"},
      {"shape of text", Changed([](json& h) { h["a"]["shape"] = "2x3"; }), "shape is"},
      {"shape of many sizes", Changed([](json& h) { h["b"]["shape"] = std::vector<int>(100, 1); }),
       "shape is"},
      {"shape missing", Changed([](json& h) { h["a"].erase("shape"); }), "shape is missing"},
      {"dtype F64", Changed([](json& h) { h["a"]["dtype"] = "F64"; }), "dtype is \"F64\""},
      {"dtype I64", Changed([](json& h) { h["a"]["dtype"] = "I64"; }), "dtype is \"I64\""},
      {"dtype in lower case", Changed([](json& h) { h["a"]["dtype"] = "f32"; }), "dtype is"},
      {"dtype a number", Changed([](json& h) { h["a"]["dtype"] = 32; }), "dtype is 32"},
      {"dtype missing", Changed([](json& h) { h["a"].erase("dtype"); }), "dtype is missing"},
      {"entry not an object", Changed([](json& h) { h["a"] = 1; }), "not an object"},
      {"metadata not an object", Changed([](json& h) { h["__metadata__"] = 1; }), "__metadata__"},
      {"name of a kilobyte", Changed([](json& h) { h[std::string(1000, 'n')] = h["a"]; }), "1000 bytes"},
      {"a name twice",
       Assemble(Pad(R"({"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},)"
                    R"("a":{"dtype":"F16","shape":[1],"data_offsets":[2,4]}})"),
                "1234"),
       "twice"},
      {"a key twice in an entry",
       Assemble(Pad(R"({"a":{"dtype":"F16","shape":[1],"shape":[2],"data_offsets":[0,4]}})"), "1234"),
       "twice"},
      {"not aligned",
       Assemble(GoodHeader().dump() + std::string(9 - GoodHeader().dump().size() % 8, ' '),
                std::string(40, '\1')),
       "not a multiple"},
      {"deep nesting", Assemble(Pad("{\"a\":" + std::string(50000, '[')), ""), "nested deeper"},
      {"millions of values",
       Assemble(Pad("{\"a\":[0" +
                    [] {
                      std::string zeros;
                      for (int i = 0; i < 1100000; ++i) zeros += ",0";
                      return zeros;
                    }() +
                    "]}"),
                ""),
       "more than"},
  };
}

TEST(SafetensorsTest, EveryCorruptionIsRefusedWithItsReason) {
  const std::vector<Corruption> corruptions = Corruptions();
  EXPECT_GE(corruptions.size(), 40u);
  for (const Corruption& bad : corruptions) {
    const FileBytes file(bad.file);
    const auto tensors = ParseSafetensors(file.view(), "file.safetensors");
    ASSERT_FALSE(tensors.ok()) << bad.what;
    const std::string message(tensors.status().message());
    EXPECT_TRUE(message.starts_with("file.safetensors")) << message;
    EXPECT_NE(message.find(bad.message), std::string::npos) << bad.what << ": " << message;
    EXPECT_LT(message.size(), 600u) << bad.what;
  }
}

TEST(SafetensorsTest, ATensorWithoutElementsTakesNoRoom) {
  const FileBytes file(Changed([](json& h) {
    h["d"] = {{"dtype", "F32"}, {"shape", {0, 7}}, {"data_offsets", {24, 24}}};
  }));
  const auto tensors = ParseSafetensors(file.view(), "f");
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  EXPECT_EQ(tensors->size(), 4u);
}

TEST(SafetensorsTest, RandomChangesNeverCrash) {
  const std::string good = GoodFile();
  const size_t header_end = good.size() - 40;
  std::mt19937 random(2);
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = good;
    for (int change = 0; change < 1 + i % 3; ++change) {
      const bool digit = random() % 2 == 0;
      bytes[random() % header_end] = static_cast<char>(digit ? '0' + random() % 10 : random());
    }
    if (i % 11 == 0) bytes.resize(random() % bytes.size());
    const FileBytes file(bytes);
    const auto tensors = ParseSafetensors(file.view(), "f");
    if (!tensors.ok()) continue;
    for (const TensorInfo& tensor : *tensors) {
      const char* begin = static_cast<const char*>(tensor.data);
      ASSERT_GE(begin, file.view().data());
      ASSERT_LE(begin + tensor.bytes(), file.view().data() + file.view().size());
    }
  }
}

TEST(SafetensorsTest, WhatIsWrittenReadsBack) {
  const ScratchDirectory scratch;
  const std::vector<float> floats = {1, -2, 3};
  const std::vector<uint16_t> halves = {0x3C00, 0xBC00, 0x3C00};
  const std::vector<TensorInfo> written = {{"odd", DType::kF16, {3}, halves.data()},
                                           {"wide", DType::kF32, {3, 1}, floats.data()}};
  std::vector<std::string> told;
  ASSERT_TRUE(WriteSafetensors(scratch.File("f"), written, [&](const TensorInfo& tensor) {
                told.push_back(tensor.name);
              }).ok());
  EXPECT_EQ(told, (std::vector<std::string>{"wide", "odd"}));  // float32 first: all are aligned
  const auto file = SafetensorsFile::Open(scratch.File("f"));
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ((*file)->tensors().size(), 2u);
  EXPECT_EQ(std::memcmp((*file)->tensors()[0].data, floats.data(), 12), 0);
  EXPECT_EQ(std::memcmp((*file)->tensors()[1].data, halves.data(), 6), 0);
  EXPECT_EQ((*file)->tensors()[1].shape, std::vector<int64_t>{3});
}

TEST(SafetensorsTest, WriterReportsAPathThatCannotBe) {
  EXPECT_FALSE(WriteSafetensors("/nonexistent/folder/file", {}).ok());
}

TEST(SafetensorsTest, OpensOnlyRegularFiles) {
  const ScratchDirectory scratch;
  EXPECT_EQ(SafetensorsFile::Open(scratch.File("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsFile::Open(scratch.path()).status().code(), absl::StatusCode::kInvalidArgument);
  ASSERT_EQ(mkfifo(scratch.File("pipe").c_str(), 0600), 0);
  EXPECT_EQ(SafetensorsFile::Open(scratch.File("pipe")).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(SafetensorsFile::Open("/dev/zero").status().code(), absl::StatusCode::kInvalidArgument);
  scratch.Write("empty", "");
  EXPECT_EQ(SafetensorsFile::Open(scratch.File("empty")).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace efla
