"""python -m benchmarks NAME [key=value …]: run a benchmark and write its results and its plot."""

import sys
from pkgutil import iter_modules

from benchmarks import driver, experiments
from gpt4d.config import ConfigError
from gpt4d.config.commands import one_line_errors


def main(arguments: list[str]) -> None:
    names = [module.name for module in iter_modules(experiments.__path__)]
    if not arguments:
        raise ConfigError(f"no benchmark is named; use one of {', '.join(names)}")
    if arguments[0] not in names:
        raise ConfigError(f"{arguments[0]}: not a benchmark; use one of {', '.join(names)}")
    driver.run(*arguments)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
