// One line an occurrence on stderr, as text or as a JSON object. Never prompt or generated text.
#ifndef EFLA_SERVER_LOG_H_
#define EFLA_SERVER_LOG_H_

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <variant>

namespace spdlog {
class logger;
}

namespace efla {

enum class LogLevel { kDebug, kInfo, kWarning, kError };
enum class LogFormat { kText, kJson };

// "debug", "info", "warning", "error".
const char* LogLevelName(LogLevel level);
std::optional<LogLevel> ParseLogLevel(std::string_view name);

// A named value of a line; views what it is given.
struct LogField {
  LogField(std::string_view field_name, std::string_view text) : name(field_name), value(text) {}
  LogField(std::string_view field_name, std::integral auto number)
      : name(field_name), value(static_cast<int64_t>(number)) {}
  LogField(std::string_view field_name, double number) : name(field_name), value(number) {}

  std::string_view name;
  std::variant<std::string_view, int64_t, double> value;
};

// Any thread.
class Log {
 public:
  // Lines go to the descriptor, which is not closed. Where nobody takes them, they are dropped after a
  // moment.
  Log(LogLevel level, LogFormat format, int descriptor = 2);

  LogLevel level() const;
  void SetLevel(LogLevel level);

  // `event` is a stable word for programs ("request_end"), `message` a sentence for people.
  void Write(LogLevel level, std::string_view event, std::string_view message,
             std::span<const LogField> fields) const;
  void Write(LogLevel level, std::string_view event, std::string_view message,
             std::initializer_list<LogField> fields = {}) const {
    Write(level, event, message, std::span(fields.begin(), fields.size()));
  }
  void Info(std::string_view event, std::string_view message,
            std::initializer_list<LogField> fields = {}) const {
    Write(LogLevel::kInfo, event, message, fields);
  }
  void Warning(std::string_view event, std::string_view message,
               std::initializer_list<LogField> fields = {}) const {
    Write(LogLevel::kWarning, event, message, fields);
  }
  void Error(std::string_view event, std::string_view message,
             std::initializer_list<LogField> fields = {}) const {
    Write(LogLevel::kError, event, message, fields);
  }

 private:
  LogFormat format_;
  std::shared_ptr<spdlog::logger> logger_;
};

}  // namespace efla

#endif  // EFLA_SERVER_LOG_H_
