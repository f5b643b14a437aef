#include "tests/e2e/calls.h"

#include <cstring>

#include "google/protobuf/any.pb.h"
#include "google/protobuf/empty.pb.h"
#include "google/protobuf/unknown_field_set.h"
#include "gtest/gtest.h"

namespace efla::e2e {
namespace {

// Messages of types that the test has no code for are read as the empty message, whose fields are all
// unknown.
const google::protobuf::UnknownField* FindField(const google::protobuf::Empty& message, int number) {
  const auto& fields = message.GetReflection()->GetUnknownFields(message);
  for (int i = 0; i < fields.field_count(); ++i) {
    if (fields.field(i).number() == number) return &fields.field(i);
  }
  return nullptr;
}

void Collect(Reply& reply, v1::GenerateResponse event) {
  const auto add = [&](const auto& part) {
    reply.text += part.text();
    reply.token_ids.insert(reply.token_ids.end(), part.token_ids().begin(), part.token_ids().end());
    reply.logprobs.insert(reply.logprobs.end(), part.logprobs().begin(), part.logprobs().end());
  };
  if (event.has_accepted()) reply.accepted = event.accepted();
  if (event.has_delta()) add(event.delta());
  if (event.has_finished()) {
    add(event.finished());
    reply.finished = event.finished();
  }
  reply.events.push_back(std::move(event));
}

}  // namespace

v1::GenerateRequest GreedyRequest(std::span<const uint32_t> prompt, uint32_t max_tokens) {
  v1::GenerateRequest request;
  request.mutable_token_ids()->mutable_ids()->Add(prompt.begin(), prompt.end());
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stopping()->set_max_tokens(max_tokens);
  request.mutable_stopping()->set_ignore_eos(true);
  return request;
}

void SetTimeout(grpc::ClientContext& context, milliseconds timeout) {
  context.set_deadline(std::chrono::system_clock::now() + timeout);
}

Reply Generate(v1::Generation::Stub& stub, const v1::GenerateRequest& request, milliseconds timeout) {
  grpc::ClientContext context;
  SetTimeout(context, timeout);
  const auto reader = stub.Generate(&context, request);
  Reply reply;
  int stage = 0;  // the order of events: accepted, progress, delta, finished
  for (v1::GenerateResponse event; reader->Read(&event);) {
    const int next = event.event_case();
    EXPECT_TRUE(stage == 0 ? next == v1::GenerateResponse::kAccepted : next >= stage && next != 1)
        << "event " << next << " after " << stage;
    EXPECT_NE(stage, v1::GenerateResponse::kFinished) << "an event after the finished one";
    stage = next;
    Collect(reply, std::move(event));
  }
  reply.status = reader->Finish();
  EXPECT_EQ(reply.status.ok(), stage == v1::GenerateResponse::kFinished)
      << ToString(reply.status) << ", last event " << stage;
  return reply;
}

bool SameBits(const v1::TokenLogprob& a, const v1::TokenLogprob& b) {
  // Serialisation keeps every bit of a float, and one build writes equal messages alike.
  return a.SerializeAsString() == b.SerializeAsString();
}

void ExpectSameTokens(const Reply& a, const Reply& b, const std::string& what) {
  ASSERT_TRUE(a.status.ok()) << what << ": " << ToString(a.status);
  ASSERT_TRUE(b.status.ok()) << what << ": " << ToString(b.status);
  EXPECT_EQ(a.token_ids, b.token_ids) << what;
  EXPECT_EQ(a.text, b.text) << what;
  ASSERT_EQ(a.logprobs.size(), b.logprobs.size()) << what;
  for (size_t i = 0; i < a.logprobs.size(); ++i) {
    ASSERT_TRUE(SameBits(a.logprobs[i], b.logprobs[i]))
        << what << ", token " << i << ": " << a.logprobs[i].ShortDebugString() << " and "
        << b.logprobs[i].ShortDebugString();
  }
}

std::string Detokenize(v1::Models::Stub& stub, const std::vector<uint32_t>& ids) {
  v1::DetokenizeRequest request;
  request.mutable_token_ids()->Add(ids.begin(), ids.end());
  v1::DetokenizeResponse response;
  grpc::ClientContext context;
  const grpc::Status status = stub.Detokenize(&context, request, &response);
  EXPECT_TRUE(status.ok()) << ToString(status);
  return response.text();
}

std::string ToString(const grpc::Status& status) {
  static const char* const kNames[] = {
      "OK",        "CANCELLED",      "UNKNOWN",           "INVALID_ARGUMENT",   "DEADLINE_EXCEEDED",
      "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION",
      "ABORTED",   "OUT_OF_RANGE",   "UNIMPLEMENTED",     "INTERNAL",           "UNAVAILABLE",
      "DATA_LOSS", "UNAUTHENTICATED"};
  const int code = status.error_code();
  const std::string name = code >= 0 && code <= 16 ? kNames[code] : std::to_string(code);
  return name + ": " + status.error_message();
}

std::optional<double> RetryDelaySeconds(const grpc::Status& status) {
  google::protobuf::Empty details;  // google.rpc.Status: code = 1, message = 2, details = 3
  if (!details.ParseFromString(status.error_details())) return std::nullopt;
  const auto& fields = details.GetReflection()->GetUnknownFields(details);
  for (int i = 0; i < fields.field_count(); ++i) {
    google::protobuf::Any any;
    if (fields.field(i).number() != 3 || !any.ParseFromString(fields.field(i).length_delimited())) continue;
    if (any.type_url() != "type.googleapis.com/google.rpc.RetryInfo") continue;
    const auto delay = BytesField(any.value(), 1);  // google.protobuf.Duration: seconds = 1, nanos = 2
    if (!delay) continue;
    return static_cast<double>(VarintField(*delay, 1).value_or(0)) +
           1e-9 * static_cast<double>(VarintField(*delay, 2).value_or(0));
  }
  return std::nullopt;
}

bool IsValidUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t at) -> int {
      return at < text.size() ? static_cast<unsigned char>(text[at]) : -1;
    };
    const int first = byte(i);
    const int length = first < 0x80   ? 1
                       : first < 0xC2 ? 0
                       : first < 0xE0 ? 2
                       : first < 0xF0 ? 3
                       : first < 0xF5 ? 4
                                      : 0;
    if (length == 0) return false;
    for (int k = 1; k < length; ++k) {
      if ((byte(i + k) & 0xC0) != 0x80 || byte(i + k) < 0) return false;
    }
    const int second = byte(i + 1);
    const bool overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
    const bool surrogate_or_past_end = (first == 0xED && second > 0x9F) || (first == 0xF4 && second > 0x8F);
    if (overlong || surrogate_or_past_end) return false;
    i += length;
  }
  return true;
}

BackgroundStream::BackgroundStream(std::shared_ptr<grpc::Channel> channel, const v1::GenerateRequest& request,
                                   milliseconds timeout)
    : stub_(v1::Generation::NewStub(channel)) {
  SetTimeout(context_, timeout);
  thread_ = std::thread([this, request] {
    const auto reader = stub_->Generate(&context_, request);
    for (v1::GenerateResponse event; reader->Read(&event);) {
      std::lock_guard lock(mutex_);
      ++num_events_;
      changed_.notify_all();
    }
    status_ = reader->Finish();
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  });
}

BackgroundStream::~BackgroundStream() {
  Cancel();
  if (thread_.joinable()) thread_.join();
}

bool BackgroundStream::WaitForEvents(size_t count) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return num_events_ >= count || ended_; });
  return num_events_ >= count;
}

size_t BackgroundStream::num_events() {
  std::lock_guard lock(mutex_);
  return num_events_;
}

grpc::Status BackgroundStream::Join() {
  if (thread_.joinable()) thread_.join();
  return status_;
}

RawCall::RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                 milliseconds timeout)
    : stub_(channel) {
  SetTimeout(context_, timeout);
  call_ = stub_.PrepareCall(&context_, method, &queue_);
  call_->StartCall(this);
  Await();
}

RawCall::~RawCall() {
  if (!finished_) {
    context_.TryCancel();
    Finish();
  }
  queue_.Shutdown();
  void* tag;
  bool ok;
  while (queue_.Next(&tag, &ok)) {
  }
}

bool RawCall::Await() {
  void* tag = nullptr;
  bool ok = false;
  return queue_.Next(&tag, &ok) && ok;
}

bool RawCall::Write(const std::string& message) {
  const grpc::Slice slice(message);
  call_->Write(grpc::ByteBuffer(&slice, 1), this);
  return Await();
}

void RawCall::WritesDone() {
  call_->WritesDone(this);
  Await();
}

std::optional<std::string> RawCall::Read() {
  grpc::ByteBuffer buffer;
  call_->Read(&buffer, this);
  if (!Await()) return std::nullopt;
  std::vector<grpc::Slice> slices;
  std::string message;
  if (!buffer.Dump(&slices).ok()) return std::nullopt;
  for (const grpc::Slice& slice : slices)
    message.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return message;
}

grpc::Status RawCall::Finish() {
  grpc::Status status;
  call_->Finish(&status, this);
  Await();
  finished_ = true;
  return status;
}

grpc::Status SendBytes(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                       const std::string& message) {
  RawCall call(channel, method);
  if (call.Write(message)) call.WritesDone();
  while (call.Read()) {
  }
  return call.Finish();
}

int HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  RawCall call(channel, "/grpc.health.v1.Health/Check");
  std::string request;  // HealthCheckRequest: service = 1
  if (!service.empty()) request = std::string("\x0a") + static_cast<char>(service.size()) + service;
  if (call.Write(request)) call.WritesDone();
  const std::optional<std::string> response = call.Read();
  const grpc::Status status = call.Finish();
  if (!status.ok()) return -status.error_code();
  return static_cast<int>(VarintField(response.value_or(""), 1).value_or(0));
}

std::optional<uint64_t> VarintField(const std::string& message, int number) {
  google::protobuf::Empty parsed;
  if (!parsed.ParseFromString(message)) return std::nullopt;
  const auto* field = FindField(parsed, number);
  if (field == nullptr || field->type() != google::protobuf::UnknownField::TYPE_VARINT) return std::nullopt;
  return field->varint();
}

std::optional<std::string> BytesField(const std::string& message, int number) {
  google::protobuf::Empty parsed;
  if (!parsed.ParseFromString(message)) return std::nullopt;
  const auto* field = FindField(parsed, number);
  if (field == nullptr || field->type() != google::protobuf::UnknownField::TYPE_LENGTH_DELIMITED) {
    return std::nullopt;
  }
  return field->length_delimited();
}

}  // namespace efla::e2e
