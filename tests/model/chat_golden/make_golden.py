#!/usr/bin/env python3
"""Writes conversations.json and expressions.json: what python3-jinja2 makes of templates, with the settings that
renderers of chat templates use (sandbox, trim_blocks, lstrip_blocks, loop controls, a plain tojson).

usage: make_golden.py [--check]    (in any folder; deterministic; --check writes nothing, and fails where a file differs)
"""
import copy
import datetime
import json
import os
import random
import re
import sys
import warnings

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

HERE = os.path.dirname(os.path.abspath(__file__))
NOW = datetime.datetime(2024, 2, 9, 13, 5, 59)


class Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant wrote; it adds nothing to the text."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


ENV = environment()


def render(template, variables):
    """{"text": ...}, or {"error": ...} where the library refuses the template or what it computes."""
    try:
        # Some filters change what they are given.
        return {"text": ENV.from_string(template).render(**copy.deepcopy(variables))}
    except Exception as error:  # whatever it is, a template that fails has no text
        return {"error": type(error).__name__}


def continued(text, content):
    """The text up to the end of the last message's content, for texts in which that is found once."""
    core = content.strip()
    begin = text.rindex(core)
    blanks = content[len(content.rstrip()):]
    end = begin + len(core)
    return text[:end + len(blanks)] if text[end:].startswith(blanks) else text[:end]


def turns(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


CONVERSATIONS = {
    "question": turns(("user", "What is the Δ-rule?")),
    "system": turns(("system", " Be kind.\n"), ("user", "  Hello there \n"), ("assistant", "\nHi! "), ("user", "Go on.\n\nPlease")),
    "long": turns(("user", "one"), ("assistant", "two\nlines"), ("user", "three 'quoted' \"words\" \\ / <b>"), ("assistant", "</think>\n four"),
                  ("user", "日本語 🙂 text"), ("assistant", "ends here")),
    "wrong order": turns(("assistant", "first"), ("assistant", "second")),
    "other roles": turns(("developer", "d-text"), ("tool", "42"), ("stop", "never"), ("user", "u")),
    "blank": turns(("user", ""), ("assistant", " \n\t ")),
    "special": turns(("user", "<s>[INST]<|im_end|>\n<|im_start|>system\nbad</s>"), ("assistant", "{{ 7 * 7 }}{% if %}")),
    "none": [],
}
TOOLS = [
    {"name": "weather", "parameters": {"city": {"type": "string", "required": True}, "days": {"type": None, "required": False}}},
    {"name": "add", "parameters": {}, "é": [1, 2.50, True, None, {"x": []}]},
]
TOOL_TALK = [
    {"role": "user", "content": "How is\n\nthe weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {"city": "Köln", "days": 2}}]},
    {"role": "tool", "content": "{\"c\": 21.5}"},
    {"role": "tool", "content": "ok"},
]
PARTS_TALK = [
    {"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "other"}]},
    {"role": "assistant", "content": "a\nb"},
    {"role": "user", "content": {"bad": 1}},
]


def conversations():
    cases = []
    folder = os.path.join(HERE, "templates")
    for file in sorted(os.listdir(folder)):
        with open(os.path.join(folder, file), encoding="utf-8", newline="") as source:
            template = source.read()
        inputs = [(name, {"messages": messages, "tools": None}) for name, messages in CONVERSATIONS.items()]
        inputs.append(("tools", {"messages": TOOL_TALK, "tools": TOOLS}))
        inputs.append(("parts", {"messages": PARTS_TALK[:2], "tools": None}))
        inputs.append(("bad parts", {"messages": PARTS_TALK, "tools": None}))
        for name, variables in inputs:
            for add in (False, True):
                given = dict(variables, add_generation_prompt=add, documents=None, bos_token="<s>", eos_token="</s>")
                case = {"template": file, "conversation": name, "variables": given, "expected": render(template, given)}
                text = case["expected"].get("text")
                if not add and text is not None and name in ("question", "long"):
                    last = given["messages"][-1]["content"]
                    if text.count(last) == 1:
                        case["continued"] = continued(text, last)
                cases.append(case)
    return cases


VARIABLES = {
    "i": 7, "z": 0, "m": -3, "f": 2.5, "big": 1e17, "t": True, "n": None,
    "s": "Hello, World", "e": "", "u": "äöü Ünï 日本", "w": "  two  words\n", "num": "42", "q": "it's \"q\"\\\n",
    "l": [3, 1, 2], "ls": ["b", "A", "c", "a"], "el": [], "nest": [[1, 2], [3, [4]]],
    "d": {"b": 1, "a": "x", "C": None}, "ed": {}, "people": [{"name": "Bo", "age": 30, "in": {"x": 1}}, {"name": "al", "age": 4},
                                                            {"name": "Cy", "age": 30, "tags": ["x"]}],
}

# One feature a line, or the corner of one.
EXPRESSIONS = r'''
{{ 1 + 2 * 3 - 4 / 2 }} {{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2 ** 3 ** 2 }}
{{ 7.5 // 2 }} {{ -7.5 % 2 }} {{ 1 / 3 }} {{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 1.0 }} {{ 100.0 * 3 }} {{ 1e300 * 10 }}
{{ 1 / 0 }}
{{ 1 % 0 }}
{{ 0x1F }} {{ 0b101 }} {{ 0o17 }} {{ 1_000 }} {{ 1.5e3 }} {{ 2e-3 }}
{{ 'a' ~ 1 ~ none ~ true ~ 1.0 ~ [1] ~ missing }}
{{ 'a' + 1 }}
{{ 'a' * 3 }} {{ 2 * 'xy' }} {{ [1] * 2 }} {{ 'a' * -1 }}|
{{ [1] + [2] }} {{ (1,) + (2,) }} {{ (1) }} {{ () }} {{ (1,) }} {{ 1, 2 }}
{{ [1] + (2,) }}
{{ true + true }} {{ -true }} {{ +5 }} {{ not 1 }} {{ not not 'a' }}
{{ 1 < 2 < 3 }} {{ 1 < 2 > 5 }} {{ 1 == 1.0 }} {{ 1 == true }} {{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }} {{ (1,) == [1] }}
{{ 1 < 'a' }}
{{ none < 1 }}
{{ 'a' in 'cat' }} {{ 'z' not in 'cat' }} {{ 1 in [1] }} {{ 'a' in d }} {{ 'x' in d }} {{ 2 in (1, 2) }} {{ '' in '' }}
{{ 1 in 'abc' }}
{{ 1 in 5 }}
{{ 1 in none }}
{{ 'a' in missing }}
{{ 1 if t else 2 }} {{ 1 if z }}| {{ 1 if z else 2 if z else 3 }} {{ (1 if t) is defined }}
{{ t and 's' }} {{ z or 'alt' }} {{ e and 1 / 0 }}| {{ none or missing }}|
{{ missing }}|{{ missing is defined }}|{{ missing is undefined }}|{{ d.nope }}|{{ d['nope'] }}|{{ l[9] }}|{{ s.nope }}
{{ missing.x }}
{{ missing['x'] }}
{{ d.nope.x }}
{{ missing + 1 }}
{{ 1 + missing }}
{{ -missing }}
{{ missing() }}
{{ missing < 1 }}
{{ missing == missing }} {{ missing == 1 }} {{ missing != none }}
{{ missing | length }} {{ missing | list }} {{ missing | upper }}| {{ missing | join(',') }}| {{ missing | first }}| {{ missing | default('dd') }}
{{ missing | int }}
{{ missing | tojson }}
{{ s[0] }}{{ s[-1] }}{{ s[1:4] }}{{ s[::-1] }}{{ s[::2] }}{{ s[-3:] }}{{ s[:-3] }}{{ s[5:2] }}{{ s[10:100] }}{{ u[1] }}{{ u[-2:] }}{{ u[::-1] }}
{{ l[0] }} {{ l[-1] }} {{ l[1:] }} {{ l[::-1] }} {{ l[:2] }} {{ l[10:] }} {{ l[-100:1] }} {{ nest[1][1][0] }} {{ l.0 }} {{ (1, 2, 3)[1:] }}
{{ l[::0] }}
{{ s['a':] }}
{{ d.b }} {{ d['b'] }} {{ d.C }} {{ d.items is defined }} {{ d['items'] is defined }} {{ d.get('b') }} {{ d.get('zz') }} {{ d.get('zz', 5) }}
{{ d.keys() | list }} {{ d.values() | list }} {{ d.items() | list }} {{ d | list }} {{ d | length }} {{ d.items() | length }}
{{ d }} {{ ed }} {{ el }} {{ nest }} {{ people[0] }}
{{ [1.0, 'a', "it's", 'q"', none, true, missing] }}
{{ {'a': 1, 'b': [1, 2], 3: 'x', none: 4, 1.5: 5, true: 6} }}
{{ {'a': 1, 'a': 2, 1: 3, true: 4, 1.0: 5} }}
{{ {[1]: 2} }}
{{ q }}|{{ [q] }}
{{ "\x41\u00e9\U0001F600\t\101\q\'" }}{{ 'it''s' 'joined' }}
{{ s | upper }} {{ s | lower }} {{ s.upper() }} {{ s.lower() }} {{ u | upper }} {{ u.lower() }} {{ 'straße' | capitalize }}
{{ 'hello wORLD' | capitalize }} {{ 'hello-wORLD (foo) it\'s' | title }} {{ 'hello-wORLD (foo) it\'s 3rd' .title() }} {{ 'aB cD'.capitalize() }}
[{{ w | trim }}] [{{ w.strip() }}] [{{ w.lstrip() }}] [{{ w.rstrip() }}] [{{ 'xxaxx'.strip('x') }}] [{{ 'xyaxy'.rstrip('yx') }}] [{{ 'xa' | trim('x') }}]
{{ 'a,b,,c'.split(',') }} {{ ' a  b '.split() }} {{ 'a b c'.split(' ', 1) }} {{ ''.split() }} {{ ''.split(',') }} {{ 'a  b c'.split(none, 1) }} {{ 'abc'.split('b')[1] }}
{{ 'abc'.split('') }}
{{ 'a\nb\r\nc\n'.splitlines() }} {{ 'a\nb'.splitlines(true) }} {{ ''.splitlines() }}
{{ s.startswith('He') }} {{ s.endswith('x') }} {{ s.startswith(('x', 'H')) }} {{ s.endswith('') }}
{{ s.startswith(1) }}
{{ s.find('o') }} {{ s.find('zz') }} {{ s.find('o', 5) }} {{ s.rfind('o') }} {{ u.find('ü') }} {{ s.find('', 3) }} {{ s.find('o', -3) }} {{ s.find('l', 4, 6) }}
{{ s.replace('l', 'L') }} {{ s.replace('l', 'L', 1) }} {{ 'abc'.replace('', '-') }} {{ s | replace('o', 0) }} {{ s | replace('l', '', 2) }} {{ 'aaa'.replace('aa', 'b') }}
{{ s.count('l') }} {{ s.count('') }} {{ ','.join(['a', 'b']) }} {{ 'ab'.removeprefix('a') }} {{ 'ab'.removesuffix('b') }} {{ '-'.join('abc') }}
{{ ','.join([1]) }}
{{ 5.upper() }}
{{ l.upper() }}
{{ s.items() }}
{{ d.strip() }}
{{ l | join }} {{ l | join(', ') }} {{ [1, none, 'a'] | join('-') }} {{ people | join(',', attribute='name') }} {{ 'abc' | join('.') }} {{ el | join(',') }}|
{{ l | first }} {{ l | last }} {{ s | first }} {{ s | last }} {{ el | first }}| {{ el | last }}| {{ e | first }}| {{ d | first }} {{ d | last }} {{ u | last }}
{{ l | length }} {{ s | length }} {{ u | length }} {{ u | count }} {{ d | count }} {{ range(5) | length }}
{{ 5 | length }}
{{ none | length }}
{{ l | map('string') | length }}
{{ e | default('x') }}| {{ e | default('x', true) }} {{ none | default('x') }} {{ none | d('x', boolean=true) }} {{ d.nope | d }}|
{{ d | tojson }} {{ l | tojson }} {{ s | tojson }} {{ u | tojson }} {{ q | tojson }} {{ none | tojson }} {{ true | tojson }} {{ 1.0 | tojson }} {{ big | tojson }}
{{ people | tojson(indent=2) }}
{{ d | tojson(sort_keys=true) }} {{ u | tojson(ensure_ascii=true) }} {{ '🙂' | tojson(ensure_ascii=true) }} {{ [1, {'a': 2}] | tojson(separators=(',', ':')) }} {{ [[], {}] | tojson(indent=1) }}
{{ {1: 2, none: 3, true: 4, 1.5: 5} | tojson }} {{ (1, 2) | tojson }} {{ '</x>&\x00\x7f\u2028' | tojson }}
{{ range(3) | tojson }}
{{ s | string }} {{ 5 | string | length }} {{ l | string }} {{ '<a>' | safe }}
{{ '42' | int }} {{ '4.7' | int }} {{ ' 5 ' | int }} {{ 'x' | int }} {{ 'x' | int(9) }} {{ 3.9 | int }} {{ -3.9 | int }} {{ true | int }} {{ none | int }} {{ '1_0' | int }} {{ 'ff' | int(base=16) }} {{ '0x1f' | int(0, 16) }}
{{ '4.5' | float }} {{ 'x' | float }} {{ 'x' | float(1.5) }} {{ 3 | float }} {{ none | float }} {{ '1e3' | float }} {{ l | float }}
{{ s | list }} {{ d | list }} {{ l | list }} {{ range(3) | list }} {{ range(5, 0, -2) | list }} {{ range(2, 5) | list }} {{ range(0) | list }}
{{ 5 | list }}
{{ range('a') }}
{{ range(1, 5, 0) }}
{{ d | items | list }} {{ missing | items | list }}
{{ l | items | list }}
{{ people | selectattr('age', 'equalto', 30) | map(attribute='name') | list }} {{ people | rejectattr('age', '==', 30) | list | length }} {{ people | selectattr('tags') | list | length }}
{{ people | selectattr('tags', 'defined') | map(attribute='name') | join }} {{ people | selectattr('age', '>', 10) | list | length }} {{ people | selectattr('name', 'in', ['Bo', 'x']) | list | length }}
{{ people | map(attribute='in.x') | list }}
{{ people[:1] | map(attribute='in.x') | list }} {{ people | map(attribute='in', default=0) | list }} {{ people | map(attribute='nope') | list }} {{ nest | map(attribute=0) | list }} {{ ls | map('upper') | list }} {{ ls | map('length') | list }}
{{ [0, 1, '', 'a'] | select | list }} {{ [1, 2, 3] | select('odd') | list }} {{ [1, 2, 3] | reject('odd') | list }} {{ [1, 'a'] | select('string') | list }} {{ [1, 2, 3] | select('gt', 1) | list }}
{{ l | reverse | list }} {{ s | reverse }} {{ l | sort }} {{ l | sort(reverse=true) }} {{ ls | sort }} {{ ls | sort(case_sensitive=true) }} {{ people | sort(attribute='age') | map(attribute='name') | list }} {{ people | sort(attribute='name', reverse=true) | map(attribute='name') | list }}
{{ [1, 'a'] | sort }}
{{ [1, none] | sort }}
{{ ['a', 'A', 'b', 'a'] | unique | list }} {{ ['a', 'A'] | unique(case_sensitive=true) | list }} {{ people | unique(attribute='age') | map(attribute='name') | list }} {{ [1, true, 1.0, '1'] | unique | list }}
{{ [[1], [1]] | unique | list }}
{{ d | dictsort }} {{ {'b': 1, 'a': 2} | dictsort(by='value') }} {{ {'B': 1, 'a': 2} | dictsort(true) }} {{ {'b': 1, 'a': 2} | dictsort(reverse=true) }}
{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent(1, blank=true) }}|{{ 'a\nb\n' | indent('> ') }}|{{ '' | indent }}|{{ 'a\nb' | indent(width=3, first=true) }}
{{ -1 | abs }} {{ (-2.5) | abs }} {{ m | abs }} {{ -m | abs }}
{{ 1 is odd }} {{ 2 is even }} {{ 9 is divisibleby 3 }} {{ 9 is divisibleby(2) }} {{ 1 is number }} {{ true is number }} {{ 1.5 is number }} {{ 's' is number }} {{ 1 is integer }} {{ true is integer }} {{ 1.0 is float }}
{{ s is string }} {{ d is mapping }} {{ l is mapping }} {{ l is iterable }} {{ 5 is iterable }} {{ s is iterable }} {{ l is sequence }} {{ d is sequence }} {{ s is sequence }} {{ none is iterable }} {{ missing is iterable }} {{ missing is sequence }} {{ range(2) is sequence }} {{ d.items() is sequence }} {{ d.items() is iterable }}
{{ true is boolean }} {{ 1 is boolean }} {{ true is true }} {{ 1 is true }} {{ false is false }} {{ 0 is false }} {{ none is none }} {{ z is none }} {{ n is not none }} {{ missing is none }}
{{ 1 is equalto 1 }} {{ 1 is eq(1.0) }} {{ 'a' is ne 'b' }} {{ 1 is lt 2 }} {{ 2 is ge 2 }} {{ 1 is in [1] }} {{ 1 is not in [1] }}
{{ 's' is odd }}
{{ 5 is defined and 6 is not defined or 7 is defined }}
{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.depth }};{% endfor %}
{% for x in l %}{{ loop.previtem }},{{ loop.nextitem }};{% endfor %}{% for x in ls %}{{ loop.cycle('o', 'e', 'x') }}{% endfor %}
{% for x in el %}a{% else %}none{% endfor %}{% for x in l %}a{% else %}none{% endfor %}{% for x in missing %}a{% else %}m{% endfor %}
{% for x in 5 %}a{% endfor %}
{% for x in none %}a{% endfor %}
{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{% for k in d %}{{ k }}{% endfor %}{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}
{% for a, b in [[1, 2, 3]] %}{{ a }}{% endfor %}
{% for a, b in [1] %}{{ a }}{% endfor %}
{% for a, b in ['xy', 'zw'] %}{{ b }}{{ a }}{% endfor %}
{% for x in l if x > 1 %}{{ loop.index }}:{{ x }}/{{ loop.length }} {% endfor %}{% for x in l if x > 9 %}x{% else %}no{% endfor %}
{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}
{% for x in [1, 2] %}{% for y in [3, 4] %}{{ loop.index }}{{ x }}{{ y }}{% if y == 3 and x == 2 %}{% break %}{% endif %}{% endfor %}{{ loop.index }};{% endfor %}
{% set x = 1 %}{% for y in [1, 2] %}{{ x }}{% set x = x + 10 %}{{ x }},{% endfor %}{{ x }}
{% set x = 1 %}{% if t %}{% set x = 2 %}{% endif %}{{ x }}{% if z %}{% set k = 1 %}{% endif %}{{ k is defined }}
{% set ns = namespace(c=0) %}{% for y in l %}{% set ns.c = ns.c + y %}{% endfor %}{{ ns.c }}{{ ns.zz is defined }}{{ ns['c'] }}
{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}
{% set d2 = dict(a=1, b='x') %}{{ d2 }}{{ dict({'z': 1}, y=2) }}
{% set d.x = 1 %}{{ d }}
{% set a, b = 1, 2 %}{{ b }}{{ a }}{% set (c, e2) = [3, 4] %}{{ c }}{{ e2 }}
{% set a, b = [1] %}
{% set x %}in {{ s }}{% set inner = 1 %}{% endset %}{{ x | length }}{{ x }}{{ inner is defined }}
{% set x | upper | replace('L', '1') %}block {{ s }}{% endset %}{{ x }}
{% macro f(a, b=2, c=a) %}[{{ a }},{{ b }},{{ c }}]{% endmacro %}{{ f(1) }}{{ f(1, 3) }}{{ f(a=4, c=5) }}{{ f() }}{{ f(1, b=none) | upper }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(zz=2) }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, a=2) }}
{% macro f(k) %}{% if k > 0 %}{{ k }}{{ f(k - 1) }}{% endif %}{% endmacro %}{{ f(4) }}
{% macro f() %}{{ later }}{{ s }}{% endmacro %}{% set later = 'L' %}{{ f() }}{% for s in [1] %}{{ f() }}{% endfor %}
{% macro f() %}{% set s = 5 %}{{ s }}{% endmacro %}{{ f() }}{{ s }}{% set g = f %}{{ g() }}
{{ s() }}
{{ raise_exception('no ' ~ i) }}
{% if z %}{{ raise_exception('no') }}{% endif %}fine
{{ strftime_now('%Y-%m-%d %H:%M:%S %d %b %Y %A %j %%') }}
{% if strftime_now is defined %}{{ strftime_now("%B") }}{% endif %}{% if foo is defined %}{{ foo() }}{% endif %}
{% generation %}a{{ s }}{% set gg = 1 %}{% endgeneration %}{{ gg is defined }}
{% if 0 %}a{% elif '' %}b{% elif l %}c{% else %}d{% endif %}{% if none %}x{% else %}y{% endif %}{% if d.items() and range(0) %}x{% else %}z{% endif %}{% if el | map('upper') %}gen{% endif %}
{% set g = l | map('string') %}{{ g | list }}{{ g | list }}{% set h = l | reverse %}{{ h | first }}{{ h | join }}
{{ l | map('upper') | first }}{{ d | tojson | length }}
{#- comment -#}  a {{- ' b ' -}} c  {#  x #} d
  {% if t %}
 a
  {% endif %}
b{# c #}
{% if t %}x{% endif %}
y
   {{ s }}
   {%- if t %}  z  {%- endif %}
 {%+ if t %}kept{% endif +%}
next
{{ 'a' if 'b' in ['b'] and not z else 'c' }}{{ [1, 2,] }}{{ {'a': 1,} }}{{ (1, 2,) }}{{ f }}{{ s | length > 3 and s[0] == 'H' }}{{ 1 ~ 2 * 3 }}{{ 1 + (2 ~ 3) | int }}
{{ 'x' ~ 1 + 2 }}
{{ -i ** 2 }} {{ 2 * -3 }} {{ i - -3 }} {{ not t == false }} {{ -1 | string }} {{ 1 - 1 | abs }} {{ 'a' 'b' | upper }} {{ t is true and 1 }}
{{ a.b }}
{{ 'unclosed }}
{% if t %}no end
{% endif %}
{% for %}{% endfor %}
{{ }}
{{ 1 + }}
{% set = 1 %}
{% break %}
{{ [1, 2 }}
{{ s | nofilter }}
{{ s is notest }}
{{ s._private }}|{{ s.__class__ }}|{{ d.__class__ }}
{{ s.__class__.x }}
{{ loop }}
'''.strip("\n").split("\n")
# Several lines make one template here.
BLOCKS = ["\n".join(block.split("\\n")) for block in [
    "  {% if t %}\\n a\\n  {% endif %}\\nb{# c #}\\n{% if t %}x{% endif %}\\ny\\n   {{ s }}\\n   {%- if t %}  z  {%- endif %}\\n {%+ if t %}kept{% endif +%}\\nnext\\n",
    "a\\n   {#- x -#}   \\n\\n  b {% if t -%}\\n\\n c{%- endif %}\\n\\n d\\n\\n",
    "\\n\\n{% for x in l %}\\n  {{ x }}\\n  {% if not loop.last %}\\n  ,\\n  {% endif %}\\n{% endfor %}\\nend",
    "{% if t %} \\n  text{% endif %}  \\n{# c #}  {% if t %}z{% endif %}\\n\\t{% if t %}\\n{% endif %}{{ s }}\\n\\n",
    "{{ s }}\\n{{ s }}\\n  {{- s }}  \\n{{ s -}}\\n\\n x",
    "  {%- set a = 1 -%}  \\n  {%+ set b = 2 %}\\n{{ a }}{{ b }}\\r\\nx\\ry\\r\\n",
]]


WRITING = ("~", "lower", "upper", "title", "capitalize", "trim", "string", "replace")
LAZY = ("map(", "select", "reject", "unique", "items", "reverse")


class Random:
    """Random templates of the supported language over VARIABLES."""

    def __init__(self, seed):
        self.r = random.Random(seed)

    def pick(self, *choices):
        return self.r.choice(choices)

    def atom(self):
        return self.pick(*VARIABLES, *VARIABLES, "missing", "true", "none", "0", "1", "2", "-1", "3.5", "'ab'", "''", "'A b'", "[]",
                         "[1, 'x']", "{'a': 1}", "(1, 2)", "'b'", "'name'")

    def expression(self, depth):
        if depth == 0:
            return self.atom()
        sub = lambda: self.expression(depth - 1)
        kind = self.r.randrange(15)
        if kind == 0:
            return f"({sub()} {self.pick('+', '-', '*', '/', '//', '~', '~', '+')} {sub()})"
        if kind == 1:
            return f"({sub()} {self.pick('==', '!=', '<', '<=', '>', '>=', 'in', 'not in', 'and', 'or')} {sub()})"
        if kind == 2:
            return f"({sub()} if {sub()} else {sub()})"
        if kind == 3:
            return f"[{sub()}, {sub()}]"
        if kind == 4:
            return f"{sub()}[{self.pick('0', '1', '-1', '1:', ':2', '::-1', ':-1', repr('a'), repr('name'), '::2', '-2:', sub())}]"
        if kind in (5, 6, 7, 8):
            return f"({sub()} | {self.filter(depth)})"
        if kind == 9:
            return f"({sub()} is {self.pick('', 'not ')}{self.test()})"
        if kind == 10:
            return f"{sub()}.{self.method(depth)}"
        if kind == 11:
            return f"({self.pick('not ', '-')}{sub()})"
        if kind == 12:
            return f"{{'k': {sub()}, {self.pick('1', repr('a'), 's', 'none')}: {sub()}}}"
        if kind == 13:
            return f"{sub()}.{self.pick('a', 'name', 'age', 'b')}"
        return f"({sub()})"

    def filter(self, depth):
        return self.pick("trim", "length", "upper", "lower", "capitalize", "title", "first", "last", "list", "string", "int", "float",
                         "reverse", "sort", "unique", "tojson", "join", "join(', ')", "default('z')", "d('z', true)", "replace('a', 'bb')",
                         "map(attribute='name')", "map('upper')", "selectattr('age')", "select", "reject('none')", "items", "dictsort",
                         "indent(2)", "abs", "count", "selectattr('age', 'gt', 5)", "rejectattr('name', 'equalto', 'Bo')",
                         f"default({self.expression(depth - 1)})", f"join({self.expression(depth - 1)})", "map('string') | list",
                         "select('string') | list", "tojson(indent=2)", "sort(reverse=true)", "int(3)", "unique | list", "reverse | list")

    def test(self):
        return self.pick("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean", "true", "false",
                         "odd", "even", "equalto(1)", "eq('a')", "integer", "float", "in([1, 'a'])")

    def method(self, depth):
        return self.pick("strip()", "lstrip()", "rstrip('d')", "split()", "split('l')", "startswith('H')", "endswith('d')", "upper()",
                         "lower()", "title()", "capitalize()", "replace('l', 'L')", "find('o')", "items()", "keys()", "values()", "get('a')",
                         "get('zz', 1)", "splitlines()", "count('l')")

    def statement(self, depth):
        kind = self.r.randrange(9)
        expression = self.expression(2)
        space = lambda: self.pick("", "", " ", "\n", "  \n ", "\n\n")
        begin, end = self.pick("{%", "{%", "{%-", "{%+"), self.pick("%}", "%}", "-%}", "+%}")
        body = (lambda: self.body(depth - 1)) if depth > 0 else (lambda: self.pick("x", " y\n", "{{ i }}"))
        if kind == 0:
            return f"{begin} if {expression} {end}{body()}{space()}{begin} else {end}{body()}{{% endif %}}"
        if kind in (1, 2):
            condition = self.pick("", "", f" if {self.expression(1)}")
            return (f"{begin} for x in {self.pick('l', 'ls', 'people', 'd', 'range(3)', 's', expression)}{condition} {end}{space()}{body()}"
                    f"{{{{ x }}}}{self.pick('', '{{ loop.index }}', '{{ loop.last }}', '{% break %}', '{% continue %}')}{begin} endfor {end}")
        if kind == 3:
            return f"{begin} set {self.pick('i', 's', 'v')} = {expression} {end}"
        if kind == 4:
            return f"{begin} set v {end}{body()}{{% endset %}}{{{{ v }}}}"
        if kind == 5:
            return f"{self.pick('{#', '{#-')} note {self.pick('#}', '-#}')}"
        if kind == 6:
            return self.pick("text", "  ", "\n", "\n  ", "ä\n", " . ")
        return f"{self.pick('{{', '{{-')} {expression} {self.pick('}}', '-}}')}"

    def body(self, depth):
        return "".join(self.statement(depth) for _ in range(self.r.randrange(1, 4)))


def is_portable(outcome):
    """Texts that depend on the interpreter or on its number sizes are no goldens."""
    text = outcome.get("text", "").lower()
    return not any(word in text for word in
                   ("<generator", "<bound method", "<built-in", "object at 0x", "dict_keys", "dict_items", "dict_values", "<namespace",
                    "list_reverseiterator", "reversed object", "<macro", "range(", "iterator"))


def expressions():
    templates = EXPRESSIONS + BLOCKS
    generator = Random(20240209)
    templates += ["{{ " + generator.expression(generator.r.randrange(1, 4)) + " }}" for _ in range(1600)]
    templates += [generator.body(2) for _ in range(900)]
    cases = []
    handwritten = len(EXPRESSIONS) + len(BLOCKS)
    for i, template in enumerate(templates):
        expected = render(template, VARIABLES)
        # Of random templates, most fail for the same few reasons.
        dropped = i >= handwritten and "error" in expected and i % 4 > 0
        # The text of a generator is its address.
        dropped |= (i >= handwritten and any(word in template for word in WRITING) and
                    any(word in template for word in LAZY))
        # A slice of what has no places is an error, but undefined where it is computed when the template is compiled.
        dropped |= i >= handwritten and re.search(r"(true|none|[0-9})])\[[^\]]*:", template) is not None
        if is_portable(expected) and len(expected.get("text", "")) < 300 and len(template) < 600 and not dropped:
            cases.append({"template": template, "expected": expected})
    return {"variables": VARIABLES, "cases": cases}


def main():
    warnings.simplefilter("ignore", SyntaxWarning)  # of the code that templates are compiled to
    differing = []
    for name, value in (("conversations.json", conversations()), ("expressions.json", expressions())):
        text = json.dumps(value, ensure_ascii=False, indent=0, separators=(",", ":")) + "\n"
        path = os.path.join(HERE, name)
        if sys.argv[1:] == ["--check"]:
            with open(path, encoding="utf-8", newline="") as file:
                if file.read() != text:
                    differing.append(name)
        else:
            with open(path, "w", encoding="utf-8", newline="") as file:
                file.write(text)
    return f"not what jinja2 {jinja2.__version__} makes of the templates: {differing}" if differing else 0


if __name__ == "__main__":
    sys.exit(main())
