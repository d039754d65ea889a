"""``rl-accel serve-cpu``: a small model behind SGLang's HTTP endpoints."""

import socket
from pathlib import Path

import click

from rl_accel.errors import ConfigError


@click.command("serve-cpu")
@click.option("--model", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=0, show_default=True, help="0 takes a free one; the first line of output names it.")
@click.option("--max-running-requests", default=64, show_default=True, help="Requests decoded together.")
@click.option("--context-length", default=4096, show_default=True, help="Largest prompt and response together.")
@click.option(
    "--seconds-per-step", default=0.0, show_default=True, help="Least time of a decoding step, as of a GPU's."
)
@click.option(
    "--kv-tokens",
    type=int,
    help="Most tokens that running requests hold together; above it the youngest is preempted. [default: no limit]",
)
@click.option("--random-seed", default=0, show_default=True)
def serve_cpu(
    model: Path,
    host: str,
    port: int,
    max_running_requests: int,
    context_length: int,
    seconds_per_step: float,
    kv_tokens: int | None,
    random_seed: int,
) -> None:
    """Serve a transformers model on this CPU as SGLang would: what slime's rollout code asks for, router included.

    For demonstrations and tests. Numbers are in float32 on one thread.
    """
    try:
        import uvicorn
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from rl_accel.lab.cpu_engine.sglang_server import Service, application
    except ImportError as error:
        raise ConfigError(f"serve-cpu needs the extra rl-accel[serve]: {error}") from error
    import torch

    from rl_accel.lab.cpu_engine.engine import Engine

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ends = network.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    try:
        engine = Engine(
            network,
            ends if isinstance(ends, list) else [ends],
            max_num_seqs=max_running_requests,
            max_model_len=context_length,
            seed=random_seed,
            seconds_per_step=seconds_per_step,
            kv_tokens=kv_tokens,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with socket.create_server((host, port)) as listener:
        url = f"http://{host}:{listener.getsockname()[1]}"
        click.echo(f"serving {model} at {url}")
        app = application(Service(engine, tokenizer, str(model), url))
        # Looking for an idle one among a hundred kept connections takes slime's HTTP client seconds of a core.
        config = uvicorn.Config(app, log_level="warning", headers=[("Connection", "close")])
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            engine.close()
