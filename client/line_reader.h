// Lines from standard input: edited as they are typed where it is a terminal (libedit: cursor keys, the lines
// before by arrow up, Ctrl-R), else as they come.
#ifndef EFLA_CLIENT_LINE_READER_H_
#define EFLA_CLIENT_LINE_READER_H_

#include <memory>
#include <string>

namespace efla {

// One in a process. Prompts and what is typed appear on standard error, so that standard output holds only
// the program's.
class LineReader {
 public:
  LineReader();
  ~LineReader();
  LineReader(const LineReader&) = delete;
  LineReader& operator=(const LineReader&) = delete;

  bool terminal() const { return editor_ != nullptr; }
  // Without its end of line. Shows `prompt` on a terminal. False at the end of the input (Ctrl-D on an empty
  // line). Lines stay in memory as long as this object, to be called up again.
  bool Read(const std::string& prompt, std::string& line);
  // Gives the terminal its modes back, for an end of the process during Read. Any thread.
  void Restore() const;

 private:
  struct Editor;
  std::unique_ptr<Editor> editor_;  // null: no terminal
};

}  // namespace efla

#endif  // EFLA_CLIENT_LINE_READER_H_
