"""A client in another language: Python with stubs generated from proto/ at test time.

usage: python_client_test.py SOURCE_DIR BIN_DIR    (EFLA_TEST_BIN_DIR replaces the second)
"""
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
        self.channel = grpc.insecure_channel(ready[1])

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

    def test_complete_tokenize_and_describe(self):
        reply = self.generation.Complete(self.request("Call me", 8), timeout=CALL_TIMEOUT_S)
        self.assertEqual(reply.usage.completion_tokens, 8)
        self.assertEqual(reply.finish_reason, generation.FINISH_REASON_MAX_TOKENS)
        model = self.models.GetModel(models.GetModelRequest(), timeout=CALL_TIMEOUT_S)
        self.assertEqual((model.vocab_size, model.has_tokenizer), (4096, True))
        for case in self.expected["tokenizer"]:
            tokens = self.models.Tokenize(models.TokenizeRequest(text=case["text"]), timeout=CALL_TIMEOUT_S)
            self.assertEqual(list(tokens.token_ids), case["ids"])

    def test_errors_carry_code_and_message(self):
        bad = self.request("Call me", 8)
        bad.sampling.top_p = 1.5
        with self.assertRaises(grpc.RpcError) as refused:
            list(self.generation.Generate(bad, timeout=CALL_TIMEOUT_S))
        self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
        self.assertIn("top_p", refused.exception.details())

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
