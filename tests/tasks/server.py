"""A small OpenAI-compatible server: a built-in checkpoint under a state policy, or answers by rule without any model.

`python server.py rule WRONG_EVERY` or `python server.py MODEL POLICY`; it prints its port once it answers.
"""

import json
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[str, Mapping[str, Any]], dict[str, Any]]


def by_rule(wrong_every: int) -> Answer:
    """Right answers (B) except for every so many seeds; `Question 5` gets an error, and 6 an output without an end."""

    def answer(prompt: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if "Question 5?" in prompt and wrong_every == 5:
            raise RuntimeError("this question is too hard")
        number = sum(prompt.encode()) + int(request["seed"])
        text = f"The answer is ({'A' if number % wrong_every == 0 else 'B'})."
        cut = "Question 6?" in prompt
        return {
            "choices": [{"index": 0, "text": "So" if cut else text, "finish_reason": "length" if cut else "stop"}],
            "usage": {"completion_tokens": 2 if cut else 7},
        }

    return answer


def by_model(name: str, policy: str) -> Answer:
    """The checkpoint under a policy; with `echo`, the log-probabilities of the prompt under the reference."""
    import torch
    from lm_eval.api.instance import Instance

    from replayeval.tasks.lm import ReplayLM

    lm = ReplayLM(name, policy=policy, dtype="float32", device="cpu")
    turn = threading.Lock()

    def echoed(prompt: str) -> dict[str, Any]:
        ids = torch.tensor([lm.tok_encode(prompt)])
        with torch.no_grad():
            logits = lm.model(ids).logits[0].double().log_softmax(-1)
        chosen = [None, *logits[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()]
        best = [None, *({"best": value} for value in logits[:-1].max(-1).values.tolist())]
        # One generated token follows the prompt; nobody looks at it.
        return {"token_logprobs": [*chosen, 0.0], "top_logprobs": [*best, {"best": 0.0}]}

    def answer(prompt: str, request: Mapping[str, Any]) -> dict[str, Any]:
        with turn:
            return answer_alone(prompt, request)

    def answer_alone(prompt: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if request.get("echo"):
            return {"choices": [{"index": 0, "text": prompt, "logprobs": echoed(prompt)}], "usage": {}}
        settings = {"until": request["stop"], "max_gen_toks": request["max_tokens"], "do_sample": False}
        text = lm.generate_until([Instance("generate_until", {}, (prompt, settings), 0)], disable_tqdm=True)[0]
        (record,) = lm.generation_records.values()
        finish = "length" if record.truncated else "stop"
        return {
            "choices": [{"index": 0, "text": text, "finish_reason": finish}],
            "usage": {"completion_tokens": len(record.output_tokens)},
        }

    return answer


def serve(answer: Answer, model: str) -> None:
    """Answer until killed."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def reply(self, status: int, values: Mapping[str, Any]) -> None:
            content = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": model}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat = self.path == "/v1/chat/completions"
            prompt = request["messages"][-1]["content"] if chat else request["prompt"]
            try:
                values = answer(prompt if isinstance(prompt, str) else prompt[0], request)
            except RuntimeError as error:
                self.reply(400, {"error": str(error)})
                return
            if chat:
                for choice in values["choices"]:
                    choice["message"] = {"role": "assistant", "content": choice.pop("text")}
            self.reply(200, values)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "rule":
        serve(by_rule(int(sys.argv[2])), "rule")
    else:
        serve(by_model(sys.argv[1], sys.argv[2]), sys.argv[1])
