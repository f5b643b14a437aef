#include "client/line_reader.h"

#include <histedit.h>
#include <stdlib.h>
#include <termios.h>
#include <unistd.h>

#include <clocale>
#include <cstdio>
#include <iostream>

namespace efla {
namespace {

constexpr int kLinesKept = 1000;

char* Prompt(EditLine* edit) {
  std::string* prompt = nullptr;
  el_get(edit, EL_CLIENTDATA, &prompt);
  return prompt->data();
}

}  // namespace

struct LineReader::Editor {
  Editor() {
    // libedit takes bytes for characters by the locale; models' texts are UTF-8 whatever it is.
    setlocale(LC_CTYPE, "");
    if (MB_CUR_MAX == 1) setlocale(LC_CTYPE, "C.UTF-8");
    tcgetattr(STDIN_FILENO, &modes);
    edit = el_init("efla", stdin, stderr, stderr);
    lines = history_init();
    HistEvent event;
    history(lines, &event, H_SETSIZE, kLinesKept);
    history(lines, &event, H_SETUNIQUE, 1);
    el_set(edit, EL_CLIENTDATA, &prompt);
    el_set(edit, EL_PROMPT, &Prompt);
    el_set(edit, EL_HIST, history, lines);
    el_set(edit, EL_EDITOR, "emacs");
    el_set(edit, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    el_set(edit, EL_SIGNAL, 1);  // a suspended or resized terminal
    el_source(edit, nullptr);    // the user's .editrc
  }
  ~Editor() {
    el_end(edit);
    history_end(lines);
  }

  termios modes;
  EditLine* edit;
  History* lines;
  std::string prompt;
};

LineReader::LineReader() {
  if (isatty(STDIN_FILENO) != 0) editor_ = std::make_unique<Editor>();
}

LineReader::~LineReader() = default;

bool LineReader::Read(const std::string& prompt, std::string& line) {
  if (editor_ == nullptr) {
    if (!std::getline(std::cin, line)) return false;
    if (line.ends_with('\r')) line.pop_back();
    return true;
  }
  editor_->prompt = prompt;
  int length = 0;
  const char* typed = el_gets(editor_->edit, &length);
  if (typed == nullptr || length <= 0) {
    std::fputs("\n", stderr);
    return false;
  }
  line.assign(typed, static_cast<size_t>(length));
  HistEvent event;
  if (line.find_first_not_of(" \n") != std::string::npos) {
    history(editor_->lines, &event, H_ENTER, typed);
  }
  if (line.ends_with('\n')) line.pop_back();
  return true;
}

void LineReader::Restore() const {
  if (editor_ != nullptr) tcsetattr(STDIN_FILENO, TCSANOW, &editor_->modes);
}

}  // namespace efla
