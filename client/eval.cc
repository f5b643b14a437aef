// efla eval: perplexity of texts, and accuracy in multiple-choice questions.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "client/command.h"
#include "client/eval_figures.h"
#include "nlohmann/json.hpp"

namespace efla {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMostInFlight = 256;
constexpr uint64_t kLargestWindow = uint64_t{1} << 31;

struct EvalFlags {
  ServerFlags server;
  std::vector<std::string> files;
  std::string choices;
  size_t window = 0;
  std::optional<size_t> stride;
  size_t in_flight = 4;
  bool json = false, quiet = false;
};

// A bar on standard error where that is a terminal. Any thread.
class ProgressBar {
 public:
  ProgressBar(size_t total, bool quiet) : total_(total), shown_(!quiet && isatty(STDERR_FILENO) != 0) {}
  ~ProgressBar() {
    if (shown_) std::fputs("\r\033[K", stderr);
  }
  // `figure`: the result so far.
  void Advance(size_t by, const std::string& figure) {
    if (!shown_) return;
    constexpr size_t kWidth = 40;
    const std::lock_guard lock(mutex_);
    done_ += by;
    const size_t filled = kWidth * done_ / std::max<size_t>(total_, 1);
    std::fprintf(stderr, "\r\033[K[%s%s] %3zu %%  %s", std::string(filled, '#').c_str(),
                 std::string(kWidth - filled, ' ').c_str(), 100 * done_ / std::max<size_t>(total_, 1),
                 figure.c_str());
  }

 private:
  const size_t total_;
  const bool shown_;
  std::mutex mutex_;  // guards done_ and the line
  size_t done_ = 0;
};

// Scores, and tries again where the server has no room for the moment or is about to go.
absl::StatusOr<v1::ScoreResponse> ScoreWithPatience(Client& client, const v1::ScoreRequest& request,
                                                    const CallOptions& options) {
  constexpr int kAttempts = 8;
  constexpr std::chrono::milliseconds kFirstWait{100}, kStep{20};
  std::chrono::milliseconds wait = kFirstWait;
  for (int attempt = 1;; ++attempt, wait *= 2) {
    absl::StatusOr<v1::ScoreResponse> score = client.Score(request, options);
    const bool may_pass = absl::IsUnavailable(score.status()) || RetryDelay(score.status()).has_value();
    if (score.ok() || !may_pass || attempt == kAttempts) return score;
    for (auto waited = kStep; waited <= wait && !options.stop.stop_requested(); waited += kStep) {
      std::this_thread::sleep_for(kStep);
    }
    if (options.stop.stop_requested()) return absl::CancelledError("stopped");
  }
}

// Runs job(0) to job(jobs - 1), `in_flight` at a time. The first error ends it; the jobs under way are
// stopped.
absl::Status RunJobs(size_t jobs, size_t in_flight, std::stop_token stop,
                     const std::function<absl::Status(size_t, std::stop_token)>& job) {
  std::stop_source failed;
  const std::stop_callback on_stop(stop, [&failed] { failed.request_stop(); });
  std::atomic<size_t> next{0};
  std::mutex mutex;  // guards first_error
  absl::Status first_error;
  std::vector<std::jthread> threads;
  for (size_t t = 0; t < std::min(jobs, in_flight); ++t) {
    threads.emplace_back([&] {
      for (size_t i = next++; i < jobs && !failed.stop_requested(); i = next++) {
        absl::Status status = job(i, failed.get_token());
        if (status.ok()) continue;
        const std::lock_guard lock(mutex);
        if (first_error.ok()) first_error = std::move(status);
        failed.request_stop();
      }
    });
  }
  threads.clear();
  if (first_error.ok() && stop.stop_requested()) return absl::CancelledError("stopped");
  return first_error;
}

// ---- Texts ----

struct Document {
  std::string file;
  std::vector<uint32_t> ids;  // with a BOS
  TextFigures figures;
};

absl::StatusOr<Document> Tokenized(Client& client, const std::string& file, const CallOptions& options) {
  absl::StatusOr<std::string> text = ReadTextFile(file);
  if (!text.ok()) return text.status();
  if (text->empty()) return absl::InvalidArgumentError(absl::StrFormat("%s is empty", file));
  Document document;
  document.file = file;
  document.figures.bytes = text->size();
  document.figures.words = CountWords(*text);
  v1::TokenizeRequest request;
  request.set_text(*std::move(text));
  request.set_add_bos(true);
  absl::StatusOr<v1::TokenizeResponse> tokens = client.Tokenize(request, options);
  if (!tokens.ok()) {
    return absl::Status(tokens.status().code(),
                        absl::StrFormat("%s: %s", file, std::string(tokens.status().message())));
  }
  document.ids.assign(tokens->token_ids().begin(), tokens->token_ids().end());
  return document;
}

absl::Status ScoreWindow(Client& client, const CallOptions& options, const Document& document,
                         const EvalWindow& window, TextFigures& figures) {
  v1::ScoreRequest request;
  request.mutable_token_ids()->mutable_ids()->Assign(document.ids.begin() + window.begin,
                                                     document.ids.begin() + window.end);
  absl::StatusOr<v1::ScoreResponse> score = ScoreWithPatience(client, request, options);
  if (!score.ok()) return score.status();
  const size_t tokens = window.end - window.begin;
  if (static_cast<size_t>(score->logprobs_size()) != tokens) {
    return absl::InternalError(
        absl::StrFormat("%d tokens were sent and %d scores came back", tokens, score->logprobs_size()));
  }
  for (size_t i = window.first_scored; i < window.end; ++i) {
    figures.sum_logprob += score->logprobs(static_cast<int>(i - window.begin)).logprob();
    ++figures.tokens;
  }
  return absl::OkStatus();
}

Json FiguresJson(const TextFigures& figures) {
  return {{"tokens_scored", figures.tokens},
          {"bytes", figures.bytes},
          {"words", figures.words},
          {"sum_logprob", figures.sum_logprob},
          {"perplexity", figures.perplexity()},
          {"bits_per_byte", figures.bits_per_byte()},
          {"byte_perplexity", figures.byte_perplexity()},
          {"word_perplexity", figures.word_perplexity()}};
}

std::string FiguresLine(const std::string& name, const TextFigures& figures) {
  return absl::StrFormat(
      "%s: %d tokens scored, %d bytes, %d words: perplexity %.6f, %.6f bits a byte, word "
      "perplexity %.4f\n",
      name, figures.tokens, figures.bytes, figures.words, figures.perplexity(), figures.bits_per_byte(),
      figures.word_perplexity());
}

absl::StatusOr<std::string> EvalTexts(Client& client, const EvalFlags& flags, const CallOptions& options) {
  std::vector<Document> documents;
  for (const std::string& file : flags.files) {
    absl::StatusOr<Document> document = Tokenized(client, file, options);
    if (!document.ok()) return document.status();
    documents.push_back(*std::move(document));
  }
  struct Job {
    size_t document;
    EvalWindow window;
    TextFigures figures;
  };
  std::vector<Job> jobs;
  size_t tokens = 0;
  for (size_t d = 0; d < documents.size(); ++d) {
    const size_t stride = flags.stride.value_or(std::max<size_t>(flags.window / 2, 1));
    for (const EvalWindow& window : EvalWindows(documents[d].ids.size(), flags.window, stride)) {
      jobs.push_back({.document = d, .window = window, .figures = {}});
    }
    tokens += documents[d].ids.size();
  }
  TextFigures so_far;
  std::mutex mutex;  // guards so_far
  ProgressBar bar(tokens, flags.quiet);
  absl::Status status =
      RunJobs(jobs.size(), flags.in_flight, options.stop, [&](size_t i, std::stop_token stop) {
        Job& job = jobs[i];
        absl::Status scored = ScoreWindow(client, {.timeout = options.timeout, .stop = stop},
                                          documents[job.document], job.window, job.figures);
        if (!scored.ok()) return scored;
        const std::lock_guard lock(mutex);
        so_far.Add(job.figures);
        bar.Advance(job.window.end - job.window.first_scored,
                    absl::StrFormat("perplexity %.4f", so_far.perplexity()));
        return absl::OkStatus();
      });
  if (!status.ok()) return status;

  // In the order of the text, so that the sum is the same whatever came first.
  for (const Job& job : jobs) documents[job.document].figures.Add(job.figures);
  TextFigures total;
  for (const Document& document : documents) total.Add(document.figures);
  if (flags.json) {
    Json json = {{"documents", Json::array()}};
    for (const Document& document : documents) {
      Json entry = {{"file", document.file}};
      entry.update(FiguresJson(document.figures));
      json["documents"].push_back(std::move(entry));
    }
    json["total"] = FiguresJson(total);
    json["window"] = flags.window == 0 ? Json() : Json(flags.window);
    return json.dump() + "\n";
  }
  std::string lines;
  for (const Document& document : documents) lines += FiguresLine(document.file, document.figures);
  if (documents.size() > 1) lines += FiguresLine("all", total);
  return lines;
}

// ---- Questions ----

absl::StatusOr<std::string> EvalQuestions(Client& client, const EvalFlags& flags,
                                          const CallOptions& options) {
  absl::StatusOr<std::string> lines = ReadTextFile(flags.choices);
  if (!lines.ok()) return lines.status();
  absl::StatusOr<std::vector<Question>> questions = ParseQuestions(*lines);
  if (!questions.ok()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %s", flags.choices, std::string(questions.status().message())));
  }
  ChoiceFigures figures;
  std::mutex mutex;  // guards figures
  ProgressBar bar(questions->size(), flags.quiet);
  absl::Status status =
      RunJobs(questions->size(), flags.in_flight, options.stop, [&](size_t i, std::stop_token stop) {
        const Question& question = (*questions)[i];
        v1::ScoreRequest request;
        request.set_text(question.context);
        for (const std::string& choice : question.choices) request.add_continuations()->set_text(choice);
        absl::StatusOr<v1::ScoreResponse> score =
            ScoreWithPatience(client, request, {.timeout = options.timeout, .stop = stop});
        if (!score.ok()) return score.status();
        if (static_cast<size_t>(score->continuations_size()) != question.choices.size()) {
          return absl::InternalError(absl::StrFormat("%d continuations were sent and %d scores came back",
                                                     question.choices.size(), score->continuations_size()));
        }
        std::vector<Choice> choices;
        for (const v1::ContinuationScore& choice : score->continuations()) {
          choices.push_back({.logprob = choice.sum_logprob(), .bytes = choice.text_bytes()});
        }
        const std::lock_guard lock(mutex);
        ++figures.questions;
        figures.right += MostProbable(choices) == question.answer ? 1 : 0;
        figures.right_by_byte += MostProbableByByte(choices) == question.answer ? 1 : 0;
        bar.Advance(1, absl::StrFormat("accuracy %.4f", figures.accuracy()));
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  const double accuracy = figures.accuracy(), by_byte = figures.accuracy_by_byte();
  if (flags.json) {
    const Json json = {
        {"file", flags.choices},       {"questions", figures.questions},
        {"accuracy", accuracy},        {"accuracy_stderr", figures.standard_error(accuracy)},
        {"accuracy_by_byte", by_byte}, {"accuracy_by_byte_stderr", figures.standard_error(by_byte)}};
    return json.dump() + "\n";
  }
  return absl::StrFormat(
      "%s: %d questions: accuracy %.4f (standard error %.4f), normalised by bytes %.4f (%.4f)\n",
      flags.choices, figures.questions, accuracy, figures.standard_error(accuracy), by_byte,
      figures.standard_error(by_byte));
}

int RunEval(const EvalFlags& flags) {
  if (flags.files.empty() && flags.choices.empty()) {
    RefuseFlags("there is nothing to score; give text files, or --choices");
  }
  if (flags.stride && *flags.stride >= flags.window) {
    RefuseFlags(
        absl::StrFormat("--stride is %d; it must be below --window, %d", *flags.stride, flags.window));
  }
  Interrupt interrupt;
  absl::StatusOr<Client> client = ConnectedClient(flags.server, interrupt);
  if (!client.ok()) return ExitStatus(client.status(), interrupt);
  const CallOptions options{.timeout = flags.server.timeout(), .stop = interrupt.token()};
  const absl::StatusOr<std::string> report =
      flags.files.empty() ? EvalQuestions(*client, flags, options) : EvalTexts(*client, flags, options);
  if (!report.ok()) return CallExitStatus(report.status(), interrupt);
  return ExitStatus(WriteOut(*report), interrupt);
}

}  // namespace

Command AddEval(CLI::App& program) {
  auto flags = std::make_shared<EvalFlags>();
  CLI::App* app = program.add_subcommand("eval", "Perplexity of text files, or accuracy in questions");
  AddServerFlags(*app, flags->server);
  CLI::Option* files =
      app->add_option("files", flags->files,
                      "Text files; each is scored whole, behind a BOS, up to the server's longest prompt");
  CLI::Option* choices =
      app->add_option(
             "--choices", flags->choices,
             "Questions instead, a JSON object a line: {\"context\": TEXT, \"choices\": [TEXT, ...], "
             "\"answer\": INDEX}; a choice begins with its own space")
          ->excludes(files);
  CLI::Option* window =
      app->add_option("--window", flags->window, "Score in windows of so many tokens instead of whole files")
          ->check(WholeNumber(2, kLargestWindow))
          ->excludes(choices);
  app->add_option("--stride", flags->stride,
                  "Tokens from one window to the next; half a window when left out")
      ->check(WholeNumber(1, kLargestWindow))
      ->needs(window);
  app->add_option("--concurrency", flags->in_flight, "Requests in flight")
      ->check(WholeNumber(1, kMostInFlight))
      ->capture_default_str();
  app->add_flag("--json", flags->json, "One JSON object");
  app->add_flag("--quiet", flags->quiet, "No progress bar");
  return {app, [flags] { return RunEval(*flags); }};
}

}  // namespace efla
