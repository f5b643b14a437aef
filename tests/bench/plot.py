#!/usr/bin/env python3
"""Draws the README's plots from the benchmark results that are kept beside this file. Standard library only.

  plot.py                  writes plots/*.svg from results/*.json
  plot.py --check          writes nothing; status 1 where the plots are not what the results give
  plot.py --import-fla FILE --command TEXT
                           results/fla_*.json from FILE, the fla_bench.json of a run of fla on the same GPU;
                           TEXT: the command that made it

results/ holds, each with its command, date and device,
  what `efla_bench --json FILE` writes, a file a model, with any batches and lengths;
  of a peer the same fields as far as they are drawn: model.source, decode, prefill; and its name as "peer".
--folder DIR takes another folder than this file's for both.
"""
import argparse
import json
import math
import pathlib
import sys
import time
from xml.sax.saxutils import escape

HERE = pathlib.Path(__file__).resolve().parent

# A light card of its own, so that the plots read alike on light and dark pages.
PAPER, BORDER, GRID, AXIS, INK, FAINT = '#ffffff', '#d0d7de', '#eaeef2', '#8c959f', '#1f2328', '#57606a'
OURS, PEER, OTHER = '#0550ae', '#bc4c00', '#1a7f37'
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"

WIDTH, HEIGHT = 860, 380
TOP, BOTTOM = 86, 72  # of a panel, to the figure's edges
LEFT, LABELS = 62, 122  # beside a panel: its axis, and the names of its lines
LABEL_HEIGHT = 32


class BadResults(Exception):
    pass


# ---- Results ----

def read_json(path):
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise BadResults(f'{path}: {error}') from error


class Run:
    """One file of results. Fields are named by path: run['model.source']."""

    def __init__(self, path):
        self.path = path
        self.fields = read_json(path)
        self.peer = self.fields.get('peer')
        self.model = self['model.source'].removeprefix('preset ')
        self.device = self['device.name']
        self.day = self['date'][:10]
        self['command']

    def __getitem__(self, name):
        value = self.fields
        for part in name.split('.'):
            if not isinstance(value, dict) or part not in value:
                raise BadResults(f'{self.path}: no field {name}')
            value = value[part]
        return value

    def points(self, section, x, y):
        """Sorted (x, y) of the objects of a section; x and y are field names or functions of an object."""
        def get(item, of):
            try:
                return of(item) if callable(of) else item[of]
            except (KeyError, TypeError) as error:
                raise BadResults(f'{self.path}: {section} has an entry without {error}') from error
        return sorted((get(item, x), get(item, y)) for item in self.fields.get(section, []))


def read_results(folder):
    """([(model, our run or None, peer's run or None)], smallest model first)"""
    ours, peers = {}, {}
    for path in sorted(folder.glob('*.json')):
        run = Run(path)
        runs = peers if run.peer else ours
        if run.model in runs:
            raise BadResults(f'{path} and {runs[run.model].path} are both of {run.model}')
        runs[run.model] = run
    if not ours:
        raise BadResults(f'{folder} has no results of efla_bench')
    for model in peers.keys() - ours.keys():
        raise BadResults(f'{peers[model].path}: there are no results of efla_bench for {model}')
    models = sorted(ours, key=lambda model: ours[model]['model.parameters'])
    return [(model, ours[model], peers.get(model)) for model in models]


def import_fla(path, command, folder):
    """Keeps of fla_bench.json what is drawn, under efla_bench's names, in a file a model in `folder`."""
    source = read_json(path)
    meta = source['meta']
    date = time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(path.stat().st_mtime))
    for model, parts in source['model'].items():
        decode = [{'batch': row['B'], 'tokens_per_second': row['graph_tok_s']}
                  for row in parts['decode'] if 'graph_tok_s' in row]
        prefill = [{'tokens': row['T'], 'tokens_per_second': row['best_tok_s']}
                   for row in parts['prefill'] if 'best_tok_s' in row]
        kept = {
            'peer': f'fla {meta["fla"]}',
            'method': 'DeltaNetForCausalLM, random bf16 weights; decode: one CUDA graph a step; '
                      'prefill: the better of eager and one CUDA graph',
            'command': command,
            'date': date,
            'device': {'kind': 'cuda', 'name': meta['gpu']},
            'versions': {name: meta[name] for name in ('torch', 'triton') if name in meta},
            'model': {'source': f'preset {model.lower()}'},
            'decode': decode,
            'prefill': prefill,
        }
        folder.mkdir(exist_ok=True)
        to = folder / f'fla_{model.lower()}.json'
        to.write_text(json.dumps(kept, indent=2) + '\n', encoding='utf-8')
        print(f'wrote {to}')


# ---- Numbers and scales ----

def short(value):
    """1234567 as 1.23M: three digits."""
    for limit, unit in ((1e6, 'M'), (1e3, 'k')):
        if value >= limit * 0.9995:
            return f'{value / limit:.3g}{unit}' if value < 999.5 * limit else f'{value / limit:.0f}{unit}'
    return f'{value:.3g}'


def thin(ticks, most):
    """Every n-th of the ticks, counted from the last, so that no more than `most` are left."""
    step = max(1, math.ceil(len(ticks) / most))
    return ticks[::-1][::step][::-1]


class Scale:
    def __init__(self, low, high, begin, end, transform):
        self.low, self.begin, self.transform = transform(low), begin, transform
        self.unit = (end - begin) / (transform(high) - self.low)

    def __call__(self, value):
        return self.begin + (self.transform(value) - self.low) * self.unit


def linear_axis(values, begin, end):
    """From zero to a round number above all values: (scale, ticks)."""
    high = max(values) * 1.05
    magnitude = 10 ** math.floor(math.log10(high / 5))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude * 5 >= high)
    count = math.ceil(high / step - 1e-9)
    return Scale(0, count * step, begin, end, float), [i * step for i in range(count + 1)]


def log_axis(values, begin, end, base, gap, pad=None):
    """Ticks at the powers of the base that lie within, and at twice and five times them where few do, no
    closer than `gap` on average. `pad`: the factor that the axis goes beyond the values."""
    low, high = min(values), max(values)
    if low == high:
        low, high = low / base, high * base
    if pad:
        low, high = low / pad, high * pad
    exponents = range(math.floor(math.log(low, base) - 1e-9), math.ceil(math.log(high, base) + 1e-9) + 1)
    steps = (1, 2, 5) if base == 10 and high / low < 1e3 else (1,)
    ticks = [base ** e * step for e in exponents for step in steps]
    ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    ticks = thin(ticks, max(2, round(abs(end - begin) / gap))) or [low, high]
    return Scale(low, high, begin, end, math.log), ticks


# ---- Drawing ----

class Line:
    def __init__(self, name, points, colour, dash='', marks=True, note='', shade=None):
        self.name, self.points, self.colour, self.dash = name, points, colour, dash
        self.marks = marks or len(points) == 1
        self.note = note    # beside its end, below the name
        self.shade = shade  # [(x, y)] that the area between is filled up to


class Panel:
    def __init__(self, title, x_title, y_title, lines, x_axis, y_axis, x_text, y_text):
        self.title, self.x_title, self.y_title = title, x_title, y_title
        self.lines = [line for line in lines if line.points]
        self.x_axis, self.y_axis = x_axis, y_axis  # functions of values, begin, end
        self.x_text, self.y_text = x_text, y_text  # of ticks


def text(x, y, words, size=12, colour=INK, anchor='start', weight='normal', turn=''):
    rotate = f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ''
    bold = f' font-weight="{weight}"' if weight != 'normal' else ''
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
            f'{bold}{rotate}>{escape(words)}</text>')


def rule(x1, y1, x2, y2, colour):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def coordinates(points):
    return ' '.join(f'{x:.1f},{y:.1f}' for x, y in points)


def spread(places, least, low, high):
    """Moves the places apart to `least` of each other within [low, high], keeping their order."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = [min(max(place, low), high) for place in places]
    for before, after in zip(order, order[1:]):
        moved[after] = max(moved[after], moved[before] + least)
    limit = high
    for i in reversed(order):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - least
    return moved


def draw_panel(panel, left, right):
    top, bottom = TOP, HEIGHT - BOTTOM
    xs = [x for line in panel.lines for x, _ in line.points]
    ys = [y for line in panel.lines for _, y in line.points + (line.shade or [])]
    x_scale, x_ticks = panel.x_axis(xs, left, right)
    y_scale, y_ticks = panel.y_axis(ys, bottom, top)
    out = [text(left, top - 14, panel.title, 13, INK, weight='600')] if panel.title else []
    for tick in y_ticks:
        out.append(rule(left, y_scale(tick), right, y_scale(tick), GRID))
        out.append(text(left - 8, y_scale(tick) + 4, panel.y_text(tick), 12, FAINT, 'end'))
    for tick in x_ticks:
        out.append(rule(x_scale(tick), bottom, x_scale(tick), bottom + 5, AXIS))
        out.append(text(x_scale(tick), bottom + 19, panel.x_text(tick), 12, FAINT, 'middle'))
    out.append(rule(left, bottom, right, bottom, AXIS))
    out.append(text((left + right) / 2, bottom + 38, panel.x_title, 12, FAINT, 'middle'))
    out.append(text(left - 48, (top + bottom) / 2, panel.y_title, 12, FAINT, 'middle', turn='-90'))

    placed = [[(x_scale(x), y_scale(y)) for x, y in line.points] for line in panel.lines]
    for line, points in zip(panel.lines, placed):
        if line.shade:
            edge = [(x_scale(x), y_scale(y)) for x, y in line.shade]
            out.append(f'<polygon points="{coordinates(points + edge[::-1])}" fill="{line.colour}" '
                       f'fill-opacity="0.15"/>')
        dash = f' stroke-dasharray="{line.dash}"' if line.dash else ''
        out.append(f'<polyline points="{coordinates(points)}" fill="none" stroke="{line.colour}" '
                   f'stroke-width="2" stroke-linejoin="round"{dash}/>')
        if line.marks:
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{line.colour}"/>' for x, y in points]
    ends = spread([points[-1][1] for points in placed], LABEL_HEIGHT, top + 4, bottom - 18)
    for line, points, end in zip(panel.lines, placed, ends):
        if abs(end - points[-1][1]) > 12:
            out.append(rule(points[-1][0] + 6, points[-1][1], right + 8, end, line.colour))
        out.append(text(right + 12, end + 2, line.name, 12, line.colour, weight='600'))
        out.append(text(right + 12, end + 16, line.note, 12, FAINT))
    return out


def draw(title, subtitle, panels, footer):
    panels = [panel for panel in panels if panel.lines]
    if not panels:
        return None
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
           f'height="{HEIGHT}" role="img" font-family="{escape(FONT)}">',
           f'<title>{escape(title)}</title>',
           f'<desc>{escape(subtitle)} {escape(footer)}</desc>',
           f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="6" fill="{PAPER}" '
           f'stroke="{BORDER}"/>',
           text(16, 26, title, 15, INK, weight='600'),
           text(16, 45, subtitle, 12, FAINT)]
    step = (WIDTH - 16) / len(panels)
    for i, panel in enumerate(panels):
        out += draw_panel(panel, 16 + i * step + LEFT, 16 + (i + 1) * step - LABELS)
    out.append(text(16, HEIGHT - 12, footer, 11, FAINT))
    return '\n'.join(out + ['</svg>']) + '\n'


# ---- The three plots ----

def footer_of(runs, section):
    """Where and when: the devices and days of the runs that have the section."""
    runs = [run for run in runs if run and run.fields.get(section)]
    devices = ', '.join(sorted({run.device for run in runs}))
    programs = {}
    for run in runs:
        programs.setdefault(run.peer or 'efla_bench', set()).add(run.day)
    days = '; '.join(f'{name} {", ".join(sorted(programs[name]))}' for name in sorted(programs))
    return f'{devices}, random weights. Measured: {days}.'


def grouped(value):
    return f'{value:,}'


def context_plot(results):
    lines = []
    for (model, run, _), colour in zip(results, (OURS, PEER, OTHER)):
        median = run.points('context', 'tokens', lambda item: item['median_seconds'] * 1e3)
        p99 = run.points('context', 'tokens', lambda item: item['p99_seconds'] * 1e3)
        if median:
            lines.append(Line(model, median, colour, note=f'{median[-1][1]:.3g} ms', shade=p99))
    panel = Panel('', 'context length, tokens', 'ms a token', lines,
                  lambda *args: log_axis(*args, base=10, gap=40), linear_axis, short,
                  lambda value: f'{value:g}')
    return draw('Inter-token latency against context length',
                'One stream. Line: median; shade: up to the 99th percentile.', [panel],
                footer_of([run for _, run, _ in results], 'context'))


def rate_plot(results, section, x, bound_share, bound_name, title, subtitle, x_title, y_axis):
    """Tokens a second, a panel a model: ours, the peer's, and the bound that ours is a share of."""
    panels = []
    for model, run, peer in results:
        ours = run.points(section, x, 'tokens_per_second')
        bound = run.points(section, x, lambda item: item['tokens_per_second'] / item[bound_share])
        lines = [Line(bound_name, bound, FAINT, dash='5 4', marks=False),
                 Line('this engine', ours, OURS)]
        if peer:
            lines.append(Line(peer.peer, peer.points(section, x, 'tokens_per_second'), PEER))
        for line in lines:
            line.note = short(line.points[-1][1]) if line.points else ''
        panels.append(Panel(model, x_title, 'tokens a second', lines,
                            lambda *args: log_axis(*args, base=2, gap=27 if section == 'decode' else 50),
                            y_axis, grouped, short))
    runs = [run for _, ours, peer in results for run in (ours, peer)]
    return draw(title, subtitle, panels, footer_of(runs, section))


def plots_of(results):
    """{file name: SVG}; a plot that no result has points for is left out."""
    plots = {
        'context.svg': context_plot(results),
        'decode.svg': rate_plot(
            results, 'decode', 'batch', 'floor_share', 'memory floor', 'Decode throughput against batch',
            'Memory floor: weights read, states read and written once a step, at the copy rate of that run.',
            'sequences that decode together', lambda *args: log_axis(*args, base=10, gap=22, pad=1.2)),
        'prefill.svg': rate_plot(
            results, 'prefill', 'tokens', 'gemm_share', 'products alone',
            'Prefill rate against prompt length',
            'One prompt. Products alone: the linear layers at the rate of one large product in the same run.',
            'prompt length, tokens', linear_axis),
    }
    return {name: plot for name, plot in plots.items() if plot}


def check(plots, folder):
    """0 where the folder holds exactly these plots; says what is different."""
    kept = {path.name: path.read_text(encoding='utf-8') for path in folder.glob('*.svg')}
    wrong = sorted(name for name in plots.keys() | kept.keys() if plots.get(name) != kept.get(name))
    for name in wrong:
        print(f'{folder / name} is not what the results give; run tests/bench/plot.py', file=sys.stderr)
    return 1 if wrong else 0


def write(plots, folder):
    folder.mkdir(exist_ok=True)
    for path in folder.glob('*.svg'):
        if path.name not in plots:
            path.unlink()
    for name, plot in plots.items():
        (folder / name).write_text(plot, encoding='utf-8')
        print(f'wrote {folder / name}')


def main():
    parser = argparse.ArgumentParser(description="Draws the README's plots from the benchmark results.")
    parser.add_argument('--check', action='store_true', help='write nothing; fail where a plot is stale')
    parser.add_argument('--folder', type=pathlib.Path, default=HERE, metavar='DIR',
                        help='of results/ and plots/')
    parser.add_argument('--import-fla', type=pathlib.Path, metavar='FILE', help='a fla_bench.json to take in')
    parser.add_argument('--command', metavar='TEXT', help='the command that made it')
    options = parser.parse_args()
    if (options.import_fla is None) != (options.command is None):
        parser.error('--import-fla and --command go together')
    results, plots = options.folder / 'results', options.folder / 'plots'
    try:
        if options.import_fla:
            import_fla(options.import_fla, options.command, results)
            return 0
        drawn = plots_of(read_results(results))
        if options.check:
            return check(drawn, plots)
        write(drawn, plots)
        return 0
    except KeyError as error:
        print(f'plot.py: {options.import_fla}: no field {error}', file=sys.stderr)
    except (BadResults, OSError) as error:
        print(f'plot.py: {error}', file=sys.stderr)
    return 1


if __name__ == '__main__':
    sys.exit(main())
