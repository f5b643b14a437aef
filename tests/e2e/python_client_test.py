"""A client in another language: Python with stubs generated from proto/ at test time.

usage: python_client_test.py SOURCE_DIR BIN_DIR    (EFLA_TEST_BIN_DIR replaces the second)
"""
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

import grpc

SOURCE_DIR, BIN_DIR = sys.argv[1], os.environ.get("EFLA_TEST_BIN_DIR") or sys.argv[2]
DEVICE = os.environ.get("EFLA_TEST_DEVICE") or "cpu"
CALL_TIMEOUT_S = 60


def generate_stubs(out_dir):
    proto_dir = os.path.join(SOURCE_DIR, "proto")
    protos = ["efla/v1/generation.proto", "efla/v1/models.proto"]
    subprocess.run(["protoc", f"--proto_path={proto_dir}", f"--python_out={out_dir}", f"--grpc_out={out_dir}",
                    "--plugin=protoc-gen-grpc=" + os.environ.get("GRPC_PYTHON_PLUGIN", "/usr/bin/grpc_python_plugin"),
                    *protos], check=True)


class Server:
    def __init__(self, checkpoint):
        self.process = subprocess.Popen(
            [os.path.join(BIN_DIR, "efla_server"), "--checkpoint", checkpoint, "--listen", "127.0.0.1:0",
             "--admin", "127.0.0.1:0", "--device", DEVICE, "--log-level", "warning"],
            stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()  # ends with the server's output, should it not become ready
        ready = re.match(r"efla_server ready grpc=(\S+) ", line)
        if not ready:
            self.stop()
            raise RuntimeError(f"no ready line but {line!r}")
        self.target = ready[1]
        self.channel = grpc.insecure_channel(self.target)

    def stop(self):
        self.process.terminate()
        try:
            return self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.process.stdout.close()


class PythonClientTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stub_dir = tempfile.TemporaryDirectory()
        generate_stubs(cls.stub_dir.name)
        sys.path.insert(0, cls.stub_dir.name)
        global generation, generation_grpc, models, models_grpc
        from efla.v1 import generation_pb2 as generation, generation_pb2_grpc as generation_grpc
        from efla.v1 import models_pb2 as models, models_pb2_grpc as models_grpc
        demo = os.path.join(SOURCE_DIR, "model", "demo")
        with open(os.path.join(demo, "expected.json"), encoding="utf-8") as file:
            cls.expected = json.load(file)
        cls.server = Server(demo)
        cls.generation = generation_grpc.GenerationStub(cls.server.channel)
        cls.models = models_grpc.ModelsStub(cls.server.channel)

    @classmethod
    def tearDownClass(cls):
        cls.server.channel.close()
        status = cls.server.stop()
        cls.stub_dir.cleanup()
        assert status == 0, f"the server's exit status is {status}"

    def request(self, text, max_tokens):
        return generation.GenerateRequest(
            text=text, sampling=generation.SamplingParams(temperature=0),
            stopping=generation.StopParams(max_tokens=max_tokens, ignore_eos=True))

    def test_stream_is_the_reference_continuation(self):
        for prompt in self.expected["prompts"]:
            text, ids, events = "", [], []
            for event in self.generation.Generate(self.request(prompt["text"], 48), timeout=CALL_TIMEOUT_S):
                events.append(event.WhichOneof("event"))
                if events[-1] in ("delta", "finished"):
                    part = getattr(event, events[-1])
                    text += part.text
                    ids += part.token_ids
            self.assertEqual((events[0], events[-1]), ("accepted", "finished"))
            self.assertEqual(len(ids), 48)
            if DEVICE == "cpu":
                self.assertEqual(ids, prompt["greedy_ids"])
                self.assertEqual(text.lstrip(" "), prompt["greedy_text"].lstrip(" "))

    def stream_ids(self, request):
        ids = []
        for event in self.generation.Generate(request, timeout=CALL_TIMEOUT_S):
            which = event.WhichOneof("event")
            if which in ("delta", "finished"):
                ids += getattr(event, which).token_ids
        return ids

    def test_eight_threads_get_what_one_gets(self):
        """All methods at once over one channel: greedy streams as in the reference, draws as when they were alone."""
        prompts, cases = self.expected["prompts"], self.expected["tokenizer"]

        def drawn(seed):
            request = self.request("Once upon a time", 24)
            request.sampling.temperature, request.sampling.seed = 0.9, seed
            return request
        alone = [list(self.generation.Complete(drawn(seed), timeout=CALL_TIMEOUT_S).token_ids) for seed in range(8)]
        self.assertGreater(len({tuple(ids) for ids in alone}), 4, "the seeds draw differently")

        def work(thread):
            for turn in range(4):
                prompt = prompts[(thread + turn) % len(prompts)]
                ids = self.stream_ids(self.request(prompt["text"], 48))
                self.assertEqual(len(ids), 48)
                if DEVICE == "cpu":
                    self.assertEqual(ids, prompt["greedy_ids"])
                seed = (3 * thread + turn) % 8
                self.assertEqual(self.stream_ids(drawn(seed)), alone[seed])
                case = cases[(5 * thread + turn) % len(cases)]
                tokens = self.models.Tokenize(models.TokenizeRequest(text=case["text"]), timeout=CALL_TIMEOUT_S)
                self.assertEqual(list(tokens.token_ids), case["ids"])
            return thread
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            self.assertEqual(list(threads.map(work, range(8))), list(range(8)))

    def test_complete_tokenize_and_describe(self):
        reply = self.generation.Complete(self.request("Call me", 8), timeout=CALL_TIMEOUT_S)
        self.assertEqual(reply.usage.completion_tokens, 8)
        self.assertEqual(reply.finish_reason, generation.FINISH_REASON_MAX_TOKENS)
        model = self.models.GetModel(models.GetModelRequest(), timeout=CALL_TIMEOUT_S)
        self.assertEqual((model.vocab_size, model.has_tokenizer), (4096, True))
        for case in self.expected["tokenizer"]:
            tokens = self.models.Tokenize(models.TokenizeRequest(text=case["text"]), timeout=CALL_TIMEOUT_S)
            self.assertEqual(list(tokens.token_ids), case["ids"])

    def test_white_space_in_json_ends(self):
        """However much the model would like it to go on."""
        blanks = set()
        for text in [" " * n for n in range(1, 9)] + ["\n", "\n\n", "\t", "\r"]:
            blanks.update(self.models.Tokenize(models.TokenizeRequest(text=text), timeout=CALL_TIMEOUT_S).token_ids)
        request = self.request("Here is the object:", 400)
        request.sampling.logit_bias.update({token: 100.0 for token in blanks})
        schema = {"type": "object", "properties": {"tall": {"type": "boolean"}, "name": {"enum": ["Ann", "Bob"]}},
                  "required": ["tall", "name"], "additionalProperties": False}
        request.constraint.json_schema = json.dumps(schema)
        reply = self.generation.Complete(request, timeout=CALL_TIMEOUT_S)
        self.assertIn(json.loads(reply.text)["name"], ("Ann", "Bob"))
        self.assertGreater(sum(token in blanks for token in reply.token_ids), 8, "it did like them")
        self.assertNotEqual(reply.finish_reason, generation.FINISH_REASON_MAX_TOKENS)
        self.assertLess(len(reply.token_ids), 200)

    def test_errors_carry_code_and_message(self):
        bad = self.request("Call me", 8)
        bad.sampling.top_p = 1.5
        with self.assertRaises(grpc.RpcError) as refused:
            list(self.generation.Generate(bad, timeout=CALL_TIMEOUT_S))
        self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("top_p", refused.exception.details())

    def test_the_readmes_program_works(self):
        with open(os.path.join(SOURCE_DIR, "client", "python", "README.md"), encoding="utf-8") as file:
            blocks = re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)
        self.assertGreaterEqual(len(blocks), 4)
        program = "\n".join(blocks).replace("127.0.0.1:50051", self.server.target)
        environment = dict(os.environ, PYTHONPATH=self.stub_dir.name)
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True,
                                timeout=CALL_TIMEOUT_S)
        self.assertEqual(result.returncode, 0, result.stderr)
        for words in ("Once upon a time", "INVALID_ARGUMENT: ", "to be made again: False", "the same turn: True", "best of two: "):
            self.assertIn(words, result.stdout)

    def test_a_stream_can_be_cancelled(self):
        stream = self.generation.Generate(self.request("Once", 100000), timeout=CALL_TIMEOUT_S)
        for _ in range(3):
            next(stream)
        stream.cancel()
        with self.assertRaises(grpc.RpcError) as cancelled:
            list(stream)
        self.assertEqual(cancelled.exception.code(), grpc.StatusCode.CANCELLED)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
