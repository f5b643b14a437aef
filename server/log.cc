#include "server/log.h"

#include <poll.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cmath>
#include <mutex>
#include <string>

namespace efla {
namespace {

constexpr std::array<const char*, 4> kLevelNames = {"debug", "info", "warning", "error"};

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

// A JSON string; also what the text form uses for values that are not one plain word, so that no value can
// forge a line.
void AppendQuoted(std::string_view text, std::string& out) {
  out += '"';
  for (char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
          fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned char>(c));
        } else {
          out += c;
        }
    }
  }
  out += '"';
}

bool IsPlainWord(std::string_view text) {
  if (text.empty()) return false;
  for (char c : text) {
    if (static_cast<unsigned char>(c) <= 0x20 || c == 0x7f || c == '"' || c == '=' || c == '\\') return false;
  }
  return true;
}

void AppendValue(const LogField& field, LogFormat format, std::string& out) {
  if (const auto* text = std::get_if<std::string_view>(&field.value)) {
    if (format == LogFormat::kText && IsPlainWord(*text)) {
      out += *text;
    } else {
      AppendQuoted(*text, out);
    }
  } else if (const auto* integer = std::get_if<int64_t>(&field.value)) {
    fmt::format_to(std::back_inserter(out), "{}", *integer);
  } else {
    const double number = std::get<double>(field.value);
    if (std::isfinite(number)) {
      fmt::format_to(std::back_inserter(out), "{:.3f}", number);
    } else {
      out += "null";
    }
  }
}

// What a line says behind its time and level.
std::string Line(LogFormat format, std::string_view event, std::string_view message,
                 std::span<const LogField> fields) {
  std::string line;
  if (format == LogFormat::kJson) {
    line += "\"event\":";
    AppendQuoted(event, line);
    line += ",\"msg\":";
    AppendQuoted(message, line);
    for (const LogField& field : fields) {
      line += ',';
      AppendQuoted(field.name, line);
      line += ':';
      AppendValue(field, format, line);
    }
  } else {
    line += event;
    line += ": ";
    for (char c : message) line += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    for (const LogField& field : fields) {
      line += ' ';
      line += field.name;
      line += '=';
      AppendValue(field, format, line);
    }
  }
  return line;
}

// Writes lines to a descriptor and waits for no reader for long: a log that nobody reads, a pipe that is
// full, must not hold up calls. Lines that cannot be written are dropped, and counted in a line once it goes
// on.
class PatientSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  PatientSink(int descriptor, LogFormat format) : descriptor_(descriptor), format_(format) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    if (dropped_ > 0) {
      const LogField lines("lines", dropped_);
      const std::string text =
          Line(format_, "log_dropped", "lines were not read in time and are lost", std::span(&lines, 1));
      spdlog::details::log_msg note(message.logger_name, spdlog::level::warn, text);
      if (WriteLine(note, 0)) dropped_ = 0;
    }
    // Who has waited in vain once does not wait again until the reader is back.
    if (!WriteLine(message, dropped_ > 0 ? 0 : kPatienceMs)) ++dropped_;
  }
  void flush_() override {}

 private:
  static constexpr int kPatienceMs = 200;

  bool IsWritable(int patience_ms) const {
    pollfd entry = {.fd = descriptor_, .events = POLLOUT, .revents = 0};
    int ready;
    do {
      ready = poll(&entry, 1, patience_ms);
    } while (ready < 0 && errno == EINTR);
    return ready > 0;
  }
  bool WriteLine(const spdlog::details::log_msg& message, int patience_ms) {
    spdlog::memory_buf_t line;
    if (is_cut_) line.push_back('\n');
    formatter_->format(message, line);
    for (size_t written = 0; written < line.size();) {
      // A pipe that is writable takes so much at once.
      const size_t part = std::min<size_t>(line.size() - written, PIPE_BUF);
      if (!IsWritable(patience_ms)) {
        if (written > 0) is_cut_ = true;
        return false;
      }
      const ssize_t count = write(descriptor_, line.data() + written, part);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) return true;  // nobody will ever read: nothing to make up for
      written += static_cast<size_t>(count);
    }
    is_cut_ = false;
    return true;
  }

  const int descriptor_;
  const LogFormat format_;
  int64_t dropped_ = 0;
  bool is_cut_ = false;  // the last line that was begun
};

}  // namespace

Log::Log(LogLevel level, LogFormat format, int descriptor)
    : format_(format),
      logger_(std::make_shared<spdlog::logger>("efla", std::make_shared<PatientSink>(descriptor, format))) {
  logger_->set_level(ToSpdlog(level));
  logger_->set_pattern(format == LogFormat::kJson ? R"({"ts":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l",%v})"
                                                  : "%Y-%m-%dT%H:%M:%S.%eZ %l %v",
                       spdlog::pattern_time_type::utc);
}

const char* LogLevelName(LogLevel level) { return kLevelNames[static_cast<size_t>(level)]; }

std::optional<LogLevel> ParseLogLevel(std::string_view name) {
  for (size_t i = 0; i < kLevelNames.size(); ++i) {
    if (name == kLevelNames[i]) return static_cast<LogLevel>(i);
  }
  return std::nullopt;
}

LogLevel Log::level() const {
  switch (logger_->level()) {
    case spdlog::level::trace:
    case spdlog::level::debug:
      return LogLevel::kDebug;
    case spdlog::level::info:
      return LogLevel::kInfo;
    case spdlog::level::warn:
      return LogLevel::kWarning;
    default:
      return LogLevel::kError;
  }
}

void Log::SetLevel(LogLevel level) { logger_->set_level(ToSpdlog(level)); }

void Log::Write(LogLevel level, std::string_view event, std::string_view message,
                std::span<const LogField> fields) const {
  if (!logger_->should_log(ToSpdlog(level))) return;
  const std::string line = Line(format_, event, message, fields);
  logger_->log(ToSpdlog(level), spdlog::string_view_t(line));
}

}  // namespace efla
