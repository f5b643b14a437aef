"""Clients that do all that a server offers, check every answer, and keep their own books of what came of each call."""
import collections
import json
import random
import re
import threading
import time

import grpc

from cluster import Client, is_busy

PROMPTS = ["Once upon a time there was a", "The sea", "Call me", "It was a dark night and", "In the morning she"]
LONG_PROMPT = "The old man told the children a story about a ship. " * 12
SCHEMA = json.dumps({"type": "object", "properties": {"tall": {"type": "boolean"}, "name": {"enum": ["Ann", "Bob"]}},
                     "required": ["tall", "name"], "additionalProperties": False})
# Methods that use the engine: refusals of these are counted as requests too.
REQUESTS = ("Generate", "Complete", "Score", "Append", "Create")
CUT = ("CANCELLED", "DEADLINE_EXCEEDED")
# What a server may make of a call whose client's deadline passes on the way there: a full queue, or a request that is empty,
# since the client had no time to send it.
ON_THE_WAY = (*CUT, "RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
# A stream holds no more undelivered tokens than this before it waits for its reader (the engine's own bound).
MOST_UNSEEN = 512

# No call that may end takes so long, on whatever machine.
PATIENCE_S = 600


class Unexpected(Exception):
    pass


class Books:
    """What the clients saw. A call is certain when its server must have seen it; one whose deadline passed before any
    answer is not."""

    def __init__(self):
        self.lock = threading.Lock()
        self.calls = collections.Counter()  # (method, code)
        self.requests = collections.Counter()  # outcome, as efla_requests_total has it
        self.deadlines, self.unseen = 0, 0  # Generate calls that a deadline cut: after an answer, before any
        self.tokens = 0  # drawn by calls that ended well
        self.cut_tokens, self.cut_calls = 0, 0  # seen of cancelled and expired calls, and how many of them had begun
        self.first_tokens = 0
        self.actions = collections.Counter()
        self.failures = []
        self.answers = {}  # what was asked -> the first answer

    def add(self, method, code):
        with self.lock:
            self.calls[method, code] += 1

    def same(self, question, answer):
        """Equal questions have equal answers, whoever asks them and whatever else runs."""
        with self.lock:
            first = self.answers.setdefault(question, answer)
        if first != answer:
            raise Unexpected(f"{question}: {answer} instead of {first}")

    def differences(self, before, after):
        """What the server's metrics, of two scrapes, say otherwise. Both scrapes are of an idle server."""
        def grown(name, **labels):
            return after.sum(name, **labels) - before.sum(name, **labels)
        found = []

        def expect(what, got, low, high=None):
            high = low if high is None else high
            if not low <= got <= high:
                found.append(f"{what}: the server counts {got:.0f}, the clients {low}" + (f" to {high}" if high > low else ""))
        methods = {labels["method"] for labels, _ in after.series["efla_grpc_calls_handled_total"]}
        codes = {labels["code"] for labels, _ in after.series["efla_grpc_calls_handled_total"]}
        for method in sorted(methods):
            for code in sorted(codes):
                if method != "Generate" or code not in ON_THE_WAY:
                    expect(f"{method} {code}", grown("efla_grpc_calls_handled_total", method=method, code=code),
                           self.calls[method, code])
        # The deadline's client and its server end it at the same time: who is first names the code.
        least = {code: self.calls["Generate", code] for code in ON_THE_WAY}
        got = {code: grown("efla_grpc_calls_handled_total", method="Generate", code=code) for code in ON_THE_WAY}
        for code in ON_THE_WAY:
            most = least[code] + self.unseen + (self.deadlines if code in CUT else 0)
            expect(f"Generate {code}", got[code], least[code], most)
        seen = sum(least.values()) + self.deadlines
        expect("Generate, cut or refused", sum(got.values()), seen, seen + self.unseen)
        cut = least["CANCELLED"] + self.deadlines
        started = grown("efla_grpc_calls_started_total")
        expect("calls started", started, grown("efla_grpc_calls_handled_total"))
        expect("calls open", after.sum("efla_grpc_streams_active"), 0)
        for outcome in ("stop", "length", "unavailable", "error", "unsatisfiable"):
            expect(f"requests, {outcome}", grown("efla_requests_total", outcome=outcome), self.requests[outcome])
        expect("requests, rejected", grown("efla_requests_total", outcome="rejected"), self.requests["rejected"],
               self.requests["rejected"] + self.unseen)
        expect("requests, cut", sum(grown("efla_requests_total", outcome=outcome) for outcome in ("cancelled", "deadline")),
               cut, cut + self.unseen)
        full = sum(number for (method, code), number in self.calls.items()
                   if code == "RESOURCE_EXHAUSTED" and method in REQUESTS)
        for reason, number in (("queue_full", full), ("invalid", self.requests["rejected"] - full), ("unavailable", 0),
                               ("session_limit", 0), ("error", 0)):
            expect(f"refused, {reason}", grown("efla_requests_rejected_total", reason=reason), number,
                   number + self.unseen * (reason in ("queue_full", "invalid")))
        begun = self.tokens + self.cut_tokens
        expect("tokens drawn", grown("efla_generation_tokens_total"), begun,
               begun + MOST_UNSEEN * (self.cut_calls + self.unseen))
        expect("tokens of requests", grown("efla_request_generation_tokens_sum"), grown("efla_generation_tokens_total"))
        expect("first tokens", grown("efla_time_to_first_token_seconds_count"), self.first_tokens,
               self.first_tokens + self.deadlines + self.unseen)
        return found


class MixedLoad:
    """Clients, each on a connection of its own, that act until stopped. `pause_s`: what they rest between two actions, on
    average."""

    def __init__(self, server, stubs, clients=8, pause_s=0.05, seed=1):
        self.books = Books()
        self.stopping = threading.Event()
        self.threads = [threading.Thread(target=Actor(self, Client(server.address, stubs), f"{seed}-{number}", pause_s).run,
                                         daemon=True) for number in range(clients)]
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self.threads), "a client hangs"


class Actor:
    def __init__(self, load, client, name, pause_s):
        self.load, self.books, self.client, self.name, self.pause_s = load, load.books, client, name, pause_s
        self.pb, self.random, self.stories = client.pb, random.Random(name), 0
        self.stubs = {"Sessions": client.sessions, "Generation": client.generation,
                      "Models": self.pb.models_grpc.ModelsStub(client.channel)}

    ACTIONS = {"greedy": 6, "sampled": 6, "samples": 2, "complete": 2, "stop_string": 2, "constrained": 3, "score": 2,
               "tokenize": 2, "story": 3, "cancel": 3, "deadline": 2, "budget": 2, "refused": 3, "crowd": 1}

    def run(self):
        names, weights = list(self.ACTIONS), list(self.ACTIONS.values())
        while not self.load.stopping.is_set():
            action = self.random.choices(names, weights)[0]
            try:
                getattr(self, action)()
            except Exception as error:  # pylint: disable=broad-except
                with self.books.lock:
                    self.books.failures.append(f"{action}: {type(error).__name__}: {error}")
            with self.books.lock:
                self.books.actions[action] += 1
            time.sleep(self.random.expovariate(1 / self.pause_s))
        self.client.close()

    # ---- Calls ----

    def refusal(self, method, error):
        """Notes a call that was refused, and waits as it says when that is a matter of time. True: try again."""
        code = error.code().name
        self.books.add(method, code)
        if method in REQUESTS:
            with self.books.lock:
                self.books.requests["rejected"] += 1
        pushback = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms")
        if code == "RESOURCE_EXHAUSTED":
            if pushback is None:
                raise Unexpected(f"{method}: no time to try again: {error.details()}")
            time.sleep(int(pushback) / 1e3 * self.random.uniform(1, 2))
            return True
        if is_busy(error):  # with a turn that was cancelled and is about to end
            time.sleep(0.02)
            return True
        return False

    def ended(self, finish_reason, tokens, samples=1):
        """Of a call: its samples are one request."""
        outcome = {"EOS": "stop", "STOP_STRING": "stop", "STOP_TOKEN": "stop", "CONSTRAINT_COMPLETE": "stop",
                   "MAX_TOKENS": "length", "TIME_BUDGET": "length"}[
                       self.pb.generation.FinishReason.Name(finish_reason).removeprefix("FINISH_REASON_")]
        with self.books.lock:
            self.books.requests[outcome] += 1
            self.books.tokens += tokens
            self.books.first_tokens += samples if tokens > 0 else 0

    def unary(self, service, method, request, code="OK"):
        """The reply; None where another code than OK is expected."""
        while True:
            try:
                reply = getattr(self.stubs[service], method)(request, timeout=PATIENCE_S)
            except grpc.RpcError as error:
                again = self.refusal(method, error)
                if error.code().name == code:
                    return None
                if again:
                    continue
                raise Unexpected(f"{method}: {error.code().name}: {error.details()}") from error
            self.books.add(method, "OK")
            if code != "OK":
                raise Unexpected(f"{method}: OK instead of {code}")
            return reply

    def complete(self, request=None):
        request = request or self.client.request(self.random.choice(PROMPTS), self.random.choice((1, 5, 20)))
        reply = self.unary("Generation", "Complete", request)
        samples = [reply, *reply.more_samples]
        self.ended(reply.finish_reason, sum(len(sample.token_ids) for sample in samples), len(samples))
        if sum(len(sample.token_ids) for sample in samples) != reply.usage.completion_tokens:
            raise Unexpected(f"Complete: usage {reply.usage} of {samples}")
        return samples

    def stream(self, request, timeout=PATIENCE_S, cancel_after=None, code="OK"):
        """Token ids, text and the finished event; None where the call was cut: by its deadline, or by its client after
        so many tokens."""
        while True:
            ids, text, finished, events = [], "", None, 0
            metadata = [("x-session-id", request.session.session_id)] if request.HasField("session") else []
            call = self.client.generation.Generate(request, timeout=timeout, metadata=metadata)
            try:
                for event in call:
                    events += 1
                    which = event.WhichOneof("event")
                    if which in ("delta", "finished"):
                        ids += getattr(event, which).token_ids
                        text += getattr(event, which).text
                    if which == "finished":
                        finished = event.finished
                    if cancel_after is not None and len(ids) >= cancel_after:
                        call.cancel()
            except grpc.RpcError as error:
                got = error.code().name
                if got == "CANCELLED" and cancel_after is not None or got == "DEADLINE_EXCEEDED" and timeout < 10:
                    with self.books.lock:
                        if got == "CANCELLED":
                            self.books.calls["Generate", got] += 1
                        elif events:
                            self.books.deadlines += 1
                        else:
                            self.books.unseen += 1
                        self.books.cut_tokens += len(ids)
                        self.books.cut_calls += events > 0
                        self.books.first_tokens += len(ids) > 0
                    return None
                if events:
                    raise Unexpected(f"Generate broke off: {got}: {error.details()}") from error
                again = self.refusal("Generate", error)
                if got == code:
                    return None
                if again:
                    continue
                raise Unexpected(f"Generate: {got}: {error.details()}") from error
            self.books.add("Generate", "OK")
            if code != "OK" or finished is None or cancel_after is not None:
                raise Unexpected(f"Generate: ended well instead of {code}, {len(ids)} tokens")
            if len(ids) != finished.usage.completion_tokens:
                raise Unexpected(f"Generate: {len(ids)} tokens, usage {finished.usage}")
            return ids, text, finished

    def generate(self, request, **kwargs):
        ended = self.stream(request, **kwargs)
        if ended:
            self.ended(ended[2].finish_reason, len(ended[0]))
        return ended

    # ---- Actions ----

    def greedy(self):
        prompt = self.random.choice((*PROMPTS, LONG_PROMPT))
        number = self.random.choice((4, 12, 40))
        request = self.client.request(prompt, number, priority=self.random.randint(-2, 2))
        request.use_prefix_cache = self.random.random() < 0.7
        ids, text, _ = self.generate(request)
        self.books.same(("greedy", prompt, number), (ids, text))

    def sampling(self, prompt, seed, tokens=16):
        request = self.client.request(prompt, tokens)
        request.sampling.temperature, request.sampling.top_p, request.sampling.seed = 0.9, 0.95, seed
        return request

    def sampled(self):
        prompt, seed = self.random.choice(PROMPTS), self.random.randrange(12)
        ids, _, _ = self.generate(self.sampling(prompt, seed))
        self.books.same(("sampled", prompt, seed), ids)

    def samples(self):
        """Sample i is the call with seed + i."""
        prompt, seed = self.random.choice(PROMPTS), self.random.randrange(8)
        request = self.sampling(prompt, seed)
        request.samples = self.random.randint(2, 4)
        for number, sample in enumerate(self.complete(request)):
            self.books.same(("sampled", prompt, seed + number), list(sample.token_ids))

    def stop_string(self):
        request = self.client.request(self.random.choice(PROMPTS), 200)
        request.stopping.stop.extend([".", ","])
        _, text, finished = self.generate(request)
        if finished.finish_reason == self.pb.generation.FINISH_REASON_STOP_STRING and ("." in text or "," in text):
            raise Unexpected(f"a stop string in {text!r}")

    def constrained(self):
        request = self.sampling(self.random.choice(PROMPTS), self.random.randrange(1000), tokens=160)
        kind = self.random.choice(("regex", "schema", "choices"))
        if kind == "regex":
            request.constraint.regex = "[0-9]{3}-[0-9]{4}"
        elif kind == "schema":
            request.constraint.json_schema = SCHEMA
        else:
            request.constraint.choices.choices.extend(["yes", "no", "perhaps"])
        _, text, finished = self.generate(request)
        good = {"regex": lambda: re.fullmatch("[0-9]{3}-[0-9]{4}", text),
                "schema": lambda: json.loads(text)["name"] in ("Ann", "Bob"),
                "choices": lambda: text in ("yes", "no", "perhaps")}[kind]
        if finished.finish_reason == self.pb.generation.FINISH_REASON_MAX_TOKENS or not good():
            raise Unexpected(f"{kind}: {text!r}")

    def score(self):
        prompt = self.random.choice(PROMPTS)
        if self.random.random() < 0.5:
            reply = self.unary("Generation", "Score", self.pb.generation.ScoreRequest(text=prompt))
            self.books.same(("score", prompt), reply.sum_logprob)
        else:
            request = self.pb.generation.ScoreRequest(text=prompt)
            for text in (" man", " ship on the sea"):
                request.continuations.add(text=text)
            reply = self.unary("Generation", "Score", request)
            self.books.same(("continuations", prompt), [part.sum_logprob for part in reply.continuations])
        with self.books.lock:
            self.books.requests["length"] += 1

    def tokenize(self):
        models, text = self.pb.models, self.random.choice(PROMPTS)
        ids = self.unary("Models", "Tokenize", models.TokenizeRequest(text=text)).token_ids
        back = self.unary("Models", "Detokenize", models.DetokenizeRequest(token_ids=ids)).text
        if back.strip() != text:
            raise Unexpected(f"{text!r} comes back as {back!r}")
        self.books.same("model", self.unary("Models", "GetModel", models.GetModelRequest()).SerializeToString())

    def cancel(self):
        self.generate(self.client.request(self.random.choice(PROMPTS), 1_000_000), cancel_after=self.random.randint(1, 60))

    def deadline(self):
        self.generate(self.client.request(self.random.choice(PROMPTS), 1_000_000), timeout=self.random.uniform(0.02, 0.4))

    def budget(self):
        request = self.client.request(self.random.choice(PROMPTS), 1_000_000)
        request.time_budget_ms = self.random.randint(1, 200)
        _, _, finished = self.generate(request)
        if finished.finish_reason != self.pb.generation.FINISH_REASON_TIME_BUDGET:
            raise Unexpected(f"a time budget ended as {finished.finish_reason}")

    def refused(self):
        bad = self.client.request("Once", 4)
        what = self.random.randrange(8)
        if what == 0:
            bad.sampling.top_p = 1.5
            self.generate(bad, code="INVALID_ARGUMENT")
        elif what == 1:
            bad.model = "another"
            self.generate(bad, code="NOT_FOUND")
        elif what == 2:
            bad.constraint.regex = "(["
            self.unary("Generation", "Complete", bad, code="INVALID_ARGUMENT")
        elif what == 3:
            bad.session.session_id = "nobody"
            self.generate(bad, code="NOT_FOUND")
        elif what == 4:
            self.unary("Generation", "Score", self.pb.generation.ScoreRequest(text="Once", top_logprobs=21),
                       code="INVALID_ARGUMENT")
        elif what == 5:
            self.unary("Models", "Detokenize", self.pb.models.DetokenizeRequest(token_ids=[4096]), code="INVALID_ARGUMENT")
        elif what == 6:
            self.unary("Sessions", "Get", self.pb.sessions.GetSessionRequest(session_id="nobody"), code="NOT_FOUND")
        else:
            self.unary("Sessions", "Append", self.pb.sessions.AppendRequest(session_id="a b", text="Once"),
                       code="INVALID_ARGUMENT")

    def crowd(self):
        """More at once than the queue may hold: some are refused, and all that are not are answered."""
        request = self.client.request("Once", 3)
        futures = [self.client.generation.Complete.future(request, timeout=PATIENCE_S) for _ in range(40)]
        for future in futures:
            try:
                reply = future.result()
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise Unexpected(f"one of a crowd: {error.code()}: {error.details()}") from error
                with self.books.lock:
                    self.books.calls["Complete", "RESOURCE_EXHAUSTED"] += 1
                    self.books.requests["rejected"] += 1
                continue
            self.books.add("Complete", "OK")
            self.ended(reply.finish_reason, len(reply.token_ids))
            self.books.same("crowd", list(reply.token_ids))

    # ---- A session's life ----

    def turn(self, session, prompt, number, tokens=8):
        request = self.client.request(prompt if number == 0 else " And then", tokens, request_id=f"turn-{number}")
        request.session.session_id, request.session.create_if_missing = session, number == 0
        request.session.durability = self.random.choice((1, 2, 3))  # NONE, ASYNC, SYNC
        return request

    def take_turn(self, session, prompt, number):
        ids, _, _ = self.generate(self.turn(session, prompt, number))
        self.books.same(("turn", prompt, number), ids)

    def session_call(self, method, code="OK", **fields):
        request = {"Create": "CreateSession", "Get": "GetSession", "List": "ListSessions", "Delete": "DeleteSession",
                   "Move": "MoveSession"}.get(method, method) + "Request"
        return self.unary("Sessions", method, getattr(self.pb.sessions, request)(**fields), code=code)

    def story(self):
        self.stories += 1
        name, prompt = f"story-{self.name}-{self.stories}", self.random.choice(PROMPTS)
        made = [name]
        self.take_turn(name, prompt, 0)
        self.take_turn(name, prompt, 1)
        again, _, _ = self.stream(self.turn(name, prompt, 1))  # a repetition is answered, and nothing is drawn
        self.books.same(("turn", prompt, 1), again)
        self.session_call("Mark", session_id=name, name="here")
        self.session_call("Create", "ALREADY_EXISTS", session_id=name)
        self.session_call("Append", session_id=name, text=" The end.")
        self.session_call("Rewind", session_id=name, mark="here")
        self.session_call("Rewind", "OUT_OF_RANGE", session_id=name, revision=1000)
        children = [f"{name}.{i}" for i in range(self.random.randint(1, 2))]
        self.session_call("Fork", session_id=name, child_ids=children)
        made += children
        if self.random.random() < 0.5:
            self.session_call("Move", session_id=name, tier=self.random.choice((3, 4)))  # HOST, DISK
        snapshot = self.export(name)
        copy = name + ".copy"
        self.import_(copy, snapshot)
        made.append(copy)
        for session in made:
            self.take_turn(session, prompt, 2)
        stale = self.turn(name, prompt, 3)
        stale.session.expected_revision = 1000
        self.generate(stale, code="ABORTED")
        self.session_call("Rewind", session_id=name)  # to before turn 2
        endless = self.turn(name, prompt, 3, tokens=1_000_000)
        self.generate(endless, cancel_after=self.random.randint(1, 20))  # rolled back
        request = self.turn(name, prompt, 2)
        request.request_id = "turn-2-again"
        ids, _, _ = self.generate(request)
        self.books.same(("turn", prompt, 2), ids)
        listed = {session.session_id for session in self.session_call("List", prefix=name).sessions}
        if not listed.issuperset(made):
            raise Unexpected(f"List: {listed} lacks some of {made}")
        for session in made:
            self.session_call("Delete", session_id=session)
        self.session_call("Get", "NOT_FOUND", session_id=name)

    def export(self, session):
        try:
            chunks = [part.chunk for part in self.client.sessions.Export(
                self.pb.sessions.ExportRequest(session_id=session), timeout=PATIENCE_S)]
        except grpc.RpcError as error:
            raise Unexpected(f"Export: {error.code()}: {error.details()}") from error
        self.books.add("Export", "OK")
        return b"".join(chunks)

    def import_(self, session, snapshot):
        def parts():
            sessions = self.pb.sessions
            yield sessions.ImportRequest(options=sessions.ImportOptions(session_id=session))
            for at in range(0, len(snapshot), 1 << 20):
                yield sessions.ImportRequest(chunk=snapshot[at:at + (1 << 20)])
        try:
            self.client.sessions.Import(parts(), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            raise Unexpected(f"Import: {error.code()}: {error.details()}") from error
        self.books.add("Import", "OK")
