"""``rl-accel slime-config``."""

import os
from pathlib import Path
from typing import Any

import click
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_accel.errors import ConfigError
from rl_accel.integrations.slime import custom_config


@click.command("slime-config")
@click.option("--enable", default="", help="Features, with commas between them: " + ",".join(custom_config.HOOKS))
@click.option(
    "--set", "settings", multiple=True, help="A further flag, such as tail_batching.prompt_ratio=1.5. May repeat."
)
@click.option("--check", type=click.Path(path_type=Path), help="Check this file instead of writing one.")
def slime_config(enable: str, settings: tuple[str, ...], check: Path | None) -> None:
    """Print the YAML that turns features on in slime: ``rl-accel slime-config --enable gae,tail_batching > rl_accel.yaml``,
    then ``--custom-config-path rl_accel.yaml``.

    slime itself takes any key of that file without a word, so ``--check FILE`` reads it as we do, and with SLIME_ROOT set looks
    its other keys up in that checkout.
    """
    if check is not None:
        root = os.environ.get("SLIME_ROOT")
        for warning in custom_config.check(check, Path(root) if root else None):
            click.echo(f"{check}: {warning}", err=True)
        click.echo(f"{check} is right")
        return
    features = [name.strip() for name in enable.split(",") if name.strip()]
    if not features:
        raise ConfigError(f"--enable wants features to turn on: {', '.join(custom_config.HOOKS)}")
    content = custom_config.make(features, _parse(settings))
    click.echo("# For slime's --custom-config-path. These keys override the command line's.")
    click.echo(OmegaConf.to_yaml(OmegaConf.create(content)), nl=False)


def _parse(settings: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    for setting in settings:
        if "=" not in setting or "." not in setting.partition("=")[0]:
            raise ConfigError(f"--set wants feature.flag=value, found {setting!r}")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)))
    except OmegaConfBaseException as error:
        raise ConfigError(f"--set: {error}") from error
    return parsed  # type: ignore[no-any-return]
