#include "server/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <cmath>
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

}  // namespace

Log::Log(LogLevel level, LogFormat format)
    : format_(format),
      logger_(std::make_shared<spdlog::logger>("efla", std::make_shared<spdlog::sinks::stderr_sink_mt>())) {
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
  std::string line;
  if (format_ == LogFormat::kJson) {
    line += "\"event\":";
    AppendQuoted(event, line);
    line += ",\"msg\":";
    AppendQuoted(message, line);
    for (const LogField& field : fields) {
      line += ',';
      AppendQuoted(field.name, line);
      line += ':';
      AppendValue(field, format_, line);
    }
  } else {
    line += event;
    line += ": ";
    for (char c : message) line += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    for (const LogField& field : fields) {
      line += ' ';
      line += field.name;
      line += '=';
      AppendValue(field, format_, line);
    }
  }
  logger_->log(ToSpdlog(level), spdlog::string_view_t(line));
}

}  // namespace efla
