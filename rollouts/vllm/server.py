"""An engine that is a separate vLLM server (started by ``vllm serve``), driven through its HTTP interface.
The interface takes and returns tokens, and has vLLM's weight transfer and vLLM's weight version.

``ServerEngine`` answers the requests of ``rollouts.vllm.worker``, so the sampler does not know which of the
two it has. ``check_servers`` asks a server about itself before anything is loaded.
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
import shlex
import socket
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import aiohttp
from pydantic_core import from_json
from tenacity import AsyncRetrying, stop_after_attempt, wait_random_exponential
from tenacity.asyncio import retry_if_exception
from yarl import URL

from common.errors import ConfigError, require
from common.versions import refusal, warning
from common.worker_process import WorkerError
from rollouts.rewards.endpoint import UNIX, Client, is_logprob
from rollouts.vllm.key import KEY_FILE, MIDDLEWARE
from rollouts.vllm.messages import (
    EngineOptions,
    Generated,
    GenerateRequest,
    TokenRow,
    ended_by_itself,
    sampling_params,
)
from rollouts.vllm.options import EXACT, WITHOUT_GPU

EXTENSION = "rollouts.vllm.backend.WorkerExtension"
KEY = "sampler.urls"
IN_FLIGHT = 256
"""Samples that a server is asked for at once: as many as vLLM computes at once by default (``--max-num-seqs``). Each
has a connection, and a connection costs as much processor time as its requests."""  # noqa: E501
ADAPTERS = "adapters-of-round-"
"""Prefix of the name of a round's adapters, which the version follows."""
NONE = ""
RESETS = 20
UPDATING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
ASK_S = 60.0
"""Seconds within which a server must answer a question about itself."""
WATCH_S = 10.0
"""Seconds after which a server that has not answered is asked whether it is well, and asked again."""
KEEP_ALIVE = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75"}
"""Seconds for which a server keeps a connection without requests: far longer than this client does, or a
request may meet a connection that the server is just closing."""
TRIES = 20
"""How often a request whose connection is lost is sent, while the server says that it is healthy."""
LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)
"""Errors of a connection."""
UNREADABLE = (LookupError, RecursionError, TypeError, ValueError)
"""Errors of a reply that is not what it should be."""
_ONCE = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
"""Requests that must not be sent again: the server may have done what they ask."""
_BYTES, _BYTES_PER_TOKEN = 4_000_000, 2_000
"""Size of the largest reply: this many bytes, and these for each token of ``EngineOptions.max_length``."""


class AnswerError(WorkerError):
    """A server gave an answer that its model cannot have drawn."""


class ServerEngine:
    """One server. Requests are answered in order; one thread at a time may use it.

    A request whose connection is lost is sent again as long as the server's engine is healthy. A sample's
    random numbers are its own, so it is the same sample.
    """

    def __init__(self, url: str, vocabulary: int | None = None, key: str | None = None) -> None:
        """``vocabulary``: number of tokens of the model; None: not known. ``key``: opens the server
        (``rollouts.vllm.key``)."""
        self.url, self._vocabulary = url.rstrip("/"), math.inf if vocabulary is None else vocabulary
        self._client = client_of(url, None, key)
        self._asked: list[Future[Any]] = []
        self._parts: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._turn = asyncio.Lock()
        self._takes_adapters = False
        self._named: dict[str, str] = {}
        """the model that every request names if adapters are sent alone, else empty"""

    def send(self, method: str, *arguments: Any) -> None:
        self._asked.append(self._client.submit(self._answer(method, arguments)))

    async def _answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return the reply to a request. vLLM leaves the connections open of requests on which its engine
        died, so the server is asked meanwhile whether it is well."""
        async with self._turn:
            work = asyncio.ensure_future(getattr(self, method)(*arguments))
            try:
                while not (await asyncio.wait({work}, timeout=WATCH_S))[0]:
                    if not (await is_healthy(self._client) or await is_healthy(self._client)):
                        raise WorkerError(f"{self.url}: its engine died in {method}")
                return await work
            finally:
                work.cancel()

    def ready(self, seconds: float, part: Callable[[Any], None] | None = None) -> bool:
        """Return whether the reply to the oldest unanswered request is there, after waiting at most
        ``seconds``. ``part`` is called with what arrives before the reply."""
        wait([self._asked[0]], seconds)
        done = self._asked[0].done()  # read before the parts, so that none of them is missed
        while not self._parts.empty():
            partial_reply = self._parts.get()
            if part is not None:
                part(partial_reply)
        return done

    def receive(self, timeout: float, begun: float | None = None) -> Any:
        """Return the reply to the oldest unanswered request, within ``timeout`` seconds of ``begun`` (None:
        now). Raises WorkerError, which names the address."""
        spent = 0.0 if begun is None else time.monotonic() - begun
        asked = self._asked.pop(0)
        try:
            return asked.result(max(0.0, timeout - spent))
        except TimeoutError as error:
            raise WorkerError(f"{self.url} did not answer within {timeout:g} s") from error
        except (
            aiohttp.ClientError,
            CancelledError,
            LookupError,
            OSError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise WorkerError(f"{self.url}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Cancel what was asked of the server. The server itself keeps running, because it was not started by
        this process."""
        self._client.close()

    # -- requests shared with rollouts.vllm.worker -----------------------------------------------------

    async def start(self, options: EngineOptions, folder: str | None, version: str) -> tuple[str, None]:
        self._takes_adapters = options.lora_rank > 0
        self._client.most_bytes = _BYTES + _BYTES_PER_TOKEN * options.max_length
        await self._versioned(NONE)
        await self._post("abort_requests", {})  # left over from a client that is gone
        await self._rpc("drop_weight_update")  # of a trainer that was killed or failed meanwhile
        if folder is not None and not self._takes_adapters:
            return await self.load(folder, version)
        return await self._versioned(NONE)

    async def load(self, folder: str, version: str) -> tuple[str, None]:
        """Load weights from a folder that the server can read too."""
        await self._versioned(NONE)
        if self._takes_adapters:
            await self._read_adapters(folder, f"{ADAPTERS}{version}")
        else:
            await self._rpc("read_weights", folder)
        return await self._fresh(version)

    async def _read_adapters(self, folder: str, name: str) -> None:
        """Load adapters under a name that is new to the server. If they replaced adapters of the same name,
        they would be read again at every step (vLLM 0.32 keeps ``load_inplace`` with the name)."""
        known = (await self._get("v1/models"))["data"]
        for old in (model["id"] for model in known if model["id"].startswith(ADAPTERS)):
            await self._post("v1/unload_lora_adapter", {"lora_name": old}, raw=True)
        await self._post("v1/load_lora_adapter", {"lora_name": name, "lora_path": folder}, raw=True)
        self._named = {"model": name}

    async def own_head(self) -> tuple[str, bool]:
        return await self._said((await self._rpc("has_own_head"))[0][0])

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> tuple[str, None]:
        await self._post("init_weight_transfer_engine", {"init_info": init_info})
        return await self._said(None)

    async def start_weight_update(self) -> tuple[str, None]:
        await self._versioned(NONE)
        await self._post("start_weight_update")
        return NONE, None

    async def update_weights(self, update_info: Any) -> tuple[str, None]:
        await self._post("update_weights", {"update_info": update_info})
        return await self._said(None)

    async def finish_weight_update(self, version: str) -> tuple[str, None]:
        await self._post("finish_weight_update")
        return await self._fresh(version)

    async def sleep(self) -> tuple[str, None]:
        """Keeps the memory, because the server has its own devices."""
        return await self._said(None)

    async def generate(self, requests: list[GenerateRequest]) -> tuple[str, None]:
        def take(place: int, reply: dict[str, Any]) -> None:
            drawn = _drawn(reply["choices"][0])
            wrong = self._impossible(drawn, requests[place])
            if wrong is not None:
                raise AnswerError(f"{self.url} answered with what its model cannot have drawn: {wrong}")
            self._parts.put([(place, drawn)])

        await self._each([(list(one.prompt), sampling_params(one)) for one in requests], take)
        return await self._said(None)

    def _impossible(self, drawn: Generated, request: GenerateRequest) -> str | None:
        """Return what is wrong with an answer; None for one that can be."""
        ids, most = drawn.token_ids, request.max_tokens
        if not all(type(token) is int and 0 <= token < self._vocabulary for token in ids):
            return f"the tokens {ids}, where the vocabulary has {self._vocabulary}"
        if not 0 < len(ids) <= most:
            return f"{len(ids)} tokens, where 1 to {most} were asked for"
        if drawn.finished and ids[-1] not in request.stop_token_ids:
            return f"an end at token {ids[-1]}, which is no stop token"
        for value in drawn.logprobs:
            if not is_logprob(value):
                return f"the log-probability {value!r}"
        return None

    async def logprobs(self, rows: list[TokenRow]) -> tuple[str, list[list[float]]]:
        params = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        logprobs: list[list[float]] = [[] for _ in rows]

        def take(place: int, reply: dict[str, Any]) -> None:
            steps = zip(rows[place][1:], reply["prompt_logprobs"][1:], strict=True)
            logprobs[place] = [step[str(token)]["logprob"] for token, step in steps]
            for value in logprobs[place]:
                if not is_logprob(value):
                    raise AnswerError(f"{self.url} answered with the log-probability {value!r}")

        await self._each([(row, params) for row in rows], take)
        return await self._said(logprobs)

    # -- HTTP ------------------------------------------------------------------------------------------

    async def _each(
        self,
        asked: list[tuple[TokenRow, dict[str, Any]]],
        take: Callable[[int, dict[str, Any]], None],
    ) -> None:
        """Call ``take`` with the place of each request and its reply, as it arrives. No reply is kept: with
        thousands of them Python's collector of garbage would take half of the time."""
        left = iter(enumerate(asked))

        async def ask() -> None:
            for place, (token_ids, params) in left:
                body = {"token_ids": token_ids, "sampling_params": params, **self._named}
                take(place, await self._post("inference/v1/generate", body))

        tasks = [asyncio.create_task(ask()) for _ in range(min(IN_FLIGHT, len(asked)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # after the first error
                task.cancel()

    async def _fresh(self, version: str) -> tuple[str, None]:
        """Drop the cache of the old weights and set the version, once all of the new weights are there."""
        for _ in range(RESETS):
            if (await self._post("reset_prefix_cache"))["success"]:
                return await self._versioned(version)
            await asyncio.sleep(1.0)  # requests of a client that is gone are still being ended
        raise WorkerError(f"{self.url}: the prefix cache of the old weights could not be dropped")

    async def _versioned(self, version: str) -> tuple[str, None]:
        await self._post("update_weight_version", {"new_version": version})
        return version, None

    async def _said(self, value: Any) -> tuple[str, Any]:
        return str((await self._get("weight_info"))["weight_version"]), value

    async def _rpc(self, method: str, *arguments: str) -> Any:
        return (await self._post("collective_rpc", {"method": method, "args": list(arguments)}))["results"]

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._sent(path, "GET", None)

    async def _post(self, path: str, body: dict[str, Any] | None = None, raw: bool = False) -> dict[str, Any]:
        """Return the JSON object that the server answers. ``raw``: its answer is another text, for which {}
        is returned."""
        sent = None if body is None else json.dumps(body).encode()
        return await self._sent(path, "POST", sent, raw)

    async def _sent(self, path: str, method: str, body: bytes | None, raw: bool = False) -> dict[str, Any]:
        try:
            return await self._reply(path, method, body, raw)
        except LOST as error:
            if path in _ONCE or not await self._is_lost(error):
                raise
        tries = AsyncRetrying(
            retry=retry_if_exception(self._is_lost),
            stop=stop_after_attempt(TRIES - 1),
            wait=wait_random_exponential(0.1, max=5.0),
            reraise=True,
        )
        again: dict[str, Any] = await tries(self._reply, path, method, body, raw)
        return again

    async def _is_lost(self, error: BaseException) -> bool:
        """Return whether ``error`` is of a connection to a server that is well."""
        return isinstance(error, LOST) and await is_healthy(self._client)

    async def _reply(self, path: str, method: str, body: bytes | None, raw: bool) -> dict[str, Any]:
        """Send a request once. Raises aiohttp.ClientError, OSError, and ValueError with the server's message
        if it refused the request."""
        reply = await self._client.exchange(method, f"{self._client.base_url}/{path}", body, _JSON)
        if reply.status != 200:
            said = reply.content[:500].decode(errors="replace")
            raise ValueError(f"{reply.status} for {self.url}/{path}: {said}")
        return {} if raw or not reply.content else dict(from_json(reply.content))


_JSON = {"Content-Type": "application/json"}


def client_of(url: str, timeout: float | None, key: str | None) -> Client:
    """Return a client of the server at ``url``, which shows ``key`` unless the server has no port."""
    shown = {} if key is None or url.startswith(UNIX) else {"Authorization": f"Bearer {key}"}
    return Client(url, timeout, _BYTES, shown)


async def is_healthy(client: Client) -> bool:
    """Return whether the server reports, within a minute, that its engine is healthy."""
    try:
        async with asyncio.timeout(ASK_S):
            return (await client.exchange("GET", f"{client.base_url}/health")).status == 200
    except (aiohttp.ClientError, OSError, ValueError):
        return False


def _drawn(choice: dict[str, Any]) -> Generated:
    finished = ended_by_itself(choice["finish_reason"])
    tokens, said = choice["token_ids"], choice["logprobs"]["content"]
    if [one["token_id"] for one in said] != tokens:
        raise ValueError("the log-probabilities are of other tokens than those that were drawn")
    return Generated(tuple(tokens), finished, tuple(one["logprob"] for one in said))


# -- checks of a server --------------------------------------------------------------------------------


def serve_command(
    address: str, model: str, options: EngineOptions, backend: str, cpu: bool, key_file: str
) -> list[str]:
    """Return the command that starts a server at ``address`` which ``sampler.urls`` accepts, as words for a
    shell in this project's folder. A server at a port asks for the key in ``key_file``; the folder of a
    socket must keep others out."""
    own = EXACT | KEEP_ALIVE | (WITHOUT_GPU if cpu else {})
    if address.startswith(UNIX):
        where = ["--uds", address.removeprefix(UNIX)]
    else:
        own |= {KEY_FILE: key_file}
        url = URL(address)
        where = ["--host", str(url.host), "--port", str(url.port), "--middleware", MIDDLEWARE]
    words = ["env", "PYTHONPATH=.", "VLLM_SERVER_DEV_MODE=1", *(f"{k}={v}" for k, v in own.items())]
    words += [f"{UPDATING}=1"] if options.lora_rank else []
    words += ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model, *where]
    words += ["--enable-scale-out", "--skip-tokenizer-init", "--generation-config", "vllm", "--seed", "0"]
    words += ["--dtype", options.dtype, "--max-model-len", str(options.max_length)]
    words += ["--logprobs-mode", logprobs_mode(options)]
    words += ["--worker-extension-cls", EXTENSION]
    if backend != "disk":
        words += ["--weight-transfer-config", json.dumps({"backend": backend})]
    if options.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(options.lora_rank)]
        words += ["--lora-target-modules", *options.lora_modules]
    if options.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(options.tensor_parallel)]
    if cpu:
        words += ["--enforce-eager", "--no-enable-chunked-prefill"]
        words += ["--kv-cache-memory-bytes", str(options.cpu_kv_cache)]
    return words


Command = Callable[[str], list[str]]
"""Function address -> the command that starts a suitable server there."""


def check_servers(
    urls: list[str],
    options: EngineOptions,
    backend: str,
    shape: dict[str, Any],
    command: Command,
    key: str | None = None,
) -> list[int]:
    """Return the number of workers of each server. ``shape``: the fields of ``SHAPE`` in the config of the
    trainer's model. Says which servers answer without ``key``. Raises ConfigError with key, address and
    remedy."""
    world_sizes = []
    for url in urls:
        with _Asking(url, command, key) as server:
            world_sizes.append(_check(server, options, backend, shape))
        if key is not None and not url.startswith(UNIX):
            with _Asking(url, command, None) as anybody:
                if anybody.status("version") == 200:
                    print(f"warning: {url} answers without a key: whoever reaches it can change its weights")
    return world_sizes


def _check(server: _Asking, options: EngineOptions, backend: str, shape: dict[str, Any]) -> int:
    version = str(server.ask("version")["version"])
    if (refused := refusal("vllm", version)) is not None:
        raise ConfigError(KEY, server.url, f"{refused} there")
    if (untested := warning("vllm", version)) is not None:
        print(f"warning: {server.url}: {untested}; the probe compares what it computes", flush=True)
    said = server.ask("server_info?config_format=json")["vllm_config"]
    model, extension = said["model_config"], said["parallel_config"]["worker_extension_cls"]
    server.require(extension == EXTENSION, f"was started without --worker-extension-cls {EXTENSION}")
    has = server.ask("collective_rpc", {"method": "model_shape"})["results"][0]
    other = [f"{name} {has[name]}, not {value}" for name, value in shape.items() if has[name] != value]
    server.require(not other, f"serves another model, {model['model']}: {', '.join(other)}")
    wanted = {
        "--dtype": (str(model["dtype"]).removeprefix("torch."), options.dtype),
        "--logprobs-mode": (model["logprobs_mode"], logprobs_mode(options)),
        "--weight-transfer-config": (
            (said.get("weight_transfer_config") or {}).get("backend"),
            None if backend == "disk" else backend,
        ),
    }
    for flag, (actual, value) in wanted.items():
        server.require(value in (None, actual), f"was started with {flag} {actual}, not {value}")
    longest = model["max_model_len"]
    short = f"was started with --max-model-len {longest}, and model.max_length is {options.max_length}"
    server.require(longest >= options.max_length, short)
    # Only whether there is such a path. To generate would kill an engine whose weights are half replaced,
    # which a trainer leaves that was killed in a hand-over.
    has_path = server.status("inference/v1/generate") in (200, 405)
    server.require(has_path, "was started without --enable-scale-out")
    return int(server.ask("get_world_size")["world_size"])


def without_adapters(
    urls: list[str], options: EngineOptions, command: Command, key: str | None = None
) -> str | None:
    """Return the reason why one of the servers does not take such adapters alone; None if all do. Raises
    ConfigError."""
    for url in urls:
        with _Asking(url, command, key) as server:
            said = server.ask("server_info?config_format=json")
        lora, updates = said["vllm_config"].get("lora_config"), said.get("vllm_env", {}).get(UPDATING)
        if not lora or not updates:
            return f"{url} was started without --enable-lora and {UPDATING}=1"
        if lora["max_lora_rank"] < options.lora_rank:
            return f"{url} was started with --max-lora-rank {lora['max_lora_rank']}, not {options.lora_rank}"
        places = lora["target_modules"]
        missing = sorted(set(options.lora_modules) - set(places)) if places else []
        if missing:
            return f"{url} was started with --lora-target-modules {' '.join(places)}: no {', '.join(missing)}"
    return None


def logprobs_mode(options: EngineOptions) -> str:
    """Return which log-probabilities of sampled tokens vLLM reports. Those of prompts are at temperature 1 in
    either mode."""
    return "raw_logprobs" if options.temperature == 1 else "processed_logprobs"


class _Asking:
    """Questions to a server about itself, before weights load. Each raises ConfigError with the address and
    the command that starts a server there."""

    def __init__(self, url: str, command: Command, key: str | None) -> None:
        self.url, self._command = url.rstrip("/"), command
        self._client = client_of(url, ASK_S, key)

    def __enter__(self) -> _Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def require(self, condition: bool, said: str) -> None:
        remedy = f"{said}; start a server there: {shlex.join(self._command(self.url))}"
        require(condition, KEY, self.url, remedy)

    def status(self, path: str) -> int:
        """Return the status of a GET."""
        return self._exchanged(path, None)[0]

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON object that answers a GET, or a POST of ``body``."""
        status, content = self._exchanged(path, body)
        said = f"answers {status} to /{path} ({content[:200].decode(errors='replace')})"
        if status == 401:
            said += ": the key that opens it is another than this run's (docs/rounds.md, Servers)"
        self.require(status == 200, said)
        try:
            return dict(json.loads(content))
        except (TypeError, ValueError, RecursionError):
            self.require(False, f"answers /{path} with something that is no JSON object")
            raise

    def _exchanged(self, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        method, sent = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        asked = self._client.exchange(method, f"{self._client.base_url}/{path}", sent, _JSON)
        try:
            reply = self._client.submit(asked).result()
            return reply.status, reply.content
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self.require(False, f"does not answer ({error or type(error).__name__})")
            raise


def address_towards(host: str | None) -> str:
    """Return this machine's address as ``host`` sees it; None: this machine itself. A name that cannot be
    resolved, as on clusters whose nodes have none, gives the address by which packets leave this machine."""
    if host is None:
        return "127.0.0.1"
    try:
        to = socket.gethostbyname(host)
    except socket.gaierror:
        to = "192.0.2.1"  # a documentation address (RFC 5737)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect((to, 9))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(asked.getsockname()[0])


def host_of(url: str) -> str | None:
    """Return the host of an address; None for a socket with a path."""
    return None if url.startswith(UNIX) else URL(url).host


def alive(url: str) -> bool:
    """Return whether the server reports that its engine is healthy."""
    client = client_of(url, ASK_S, None)
    try:
        return client.submit(is_healthy(client)).result()
    finally:
        client.close()
