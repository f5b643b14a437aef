// Random requests, made through reflection: of a method's request type as it is in the protocol files, so
// that a field that is added there is tried here at once, with any value until random_message.cc knows
// sensible ones.
#ifndef EFLA_TESTS_E2E_RANDOM_MESSAGE_H_
#define EFLA_TESTS_E2E_RANDOM_MESSAGE_H_

#include <google/protobuf/message.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "efla/v1/generation.pb.h"
#include "efla/v1/sessions.pb.h"

namespace efla::e2e {

// What a server takes.
struct ServedFacts {
  std::string model;
  uint32_t vocab_size = 0;
  bool has_tokenizer = false;
  bool has_chat_template = false;
  bool has_store = false;    // sessions' disk
  uint32_t max_samples = 1;  // of a call
  int max_priority = 8;
};

// Sessions of random requests have names that begin with this.
inline constexpr char kFuzzedPrefix[] = "fuzzed-";

// For one thread.
class RandomMessages {
 public:
  RandomMessages(ServedFacts facts, uint32_t seed) : facts_(std::move(facts)), random_(seed) {}

  // A request that is within all bounds: a server may refuse it only for what else goes on there.
  void FillValid(google::protobuf::Message& request);
  // Then up to `most` fields, anywhere in it, get a value at a bound, beyond it or of no meaning, or fields
  // appear that are not in the protocol.
  void Spoil(google::protobuf::Message& request, int most);

  std::mt19937& random() { return random_; }
  size_t Below(size_t bound) { return random_() % bound; }
  bool OneIn(size_t n) { return Below(n) == 0; }
  std::string SessionName();
  // Any valid UTF-8: empty, long, of control characters, of the largest code points.
  std::string WildText();
  // A character or a few of `text` are others, or gone. Valid UTF-8 stays so.
  std::string Scramble(std::string text);
  std::string RandomBytes(size_t size);
  // Bits flipped, cut short, spliced with `other`, or other bytes altogether.
  std::string Mutate(std::string bytes, const std::string& other);

 private:
  using Message = google::protobuf::Message;
  using Field = google::protobuf::FieldDescriptor;
  struct Spot {
    Message* message;
    const Field* field;
  };

  void FillFields(Message& message);
  void SetValid(Message& message, const Field& field);
  void SetAny(Message& message, const Field& field);
  void SetNumber(Message& message, const Field& field, double value);
  void SetText(Message& message, const Field& field, std::string value);
  void FindSpots(Message& message, std::vector<Spot>& spots);

  // What no single field can see.
  void Agree(v1::GenerateRequest& request);
  void Agree(v1::ScoreRequest& request);
  void Agree(v1::AppendRequest& request);
  void Agree(v1::CreateSessionRequest& request);
  void Agree(v1::ForkRequest& request);
  template <typename Request>
  void OnePrompt(Request& request, bool may_be_absent);
  void FillConstraint(v1::Constraint& constraint);
  std::vector<uint32_t> PromptIds();
  std::string PromptText();

  const ServedFacts facts_;
  std::mt19937 random_;
};

}  // namespace efla::e2e

#endif  // EFLA_TESTS_E2E_RANDOM_MESSAGE_H_
