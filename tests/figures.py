"""How large and how plain the code is: python tests/figures.py [FOLDER] prints what was counted.

    files, lines, bytes     of the *.py in the folder, its tests, its README
    logic lines over 100    lines of function bodies, docstrings and comments aside
    named lambdas           `name = lambda ...`
    functions, lines run    by two steps of `train_oe.py --preset laptop` on a prepared store

FOLDER is a checkout (default: this one). The run needs FOLDER/stores/stdlib-8192, and is left out
where that is missing.
"""
import ast
import json
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH = 100

# python -c COUNTS FOLDER OUT: run the laptop preset under a tracer, print [functions, lines, files]
COUNTS = """
import json, os, sys
folder, out = os.path.realpath(sys.argv[1]), sys.argv[2]
sys.path.insert(0, folder)
os.chdir(folder)
import train_oe                                   # importing is no part of a run
seen, lines = set(), set()
def tracer(frame, event, arg):
    code = frame.f_code
    if code.co_filename[0] == "<" or os.path.dirname(os.path.realpath(code.co_filename)) != folder:
        return None
    if event == "call" and not code.co_name.startswith("<"):
        seen.add((code.co_filename, code.co_qualname))
    if event == "line":
        lines.add((code.co_filename, frame.f_lineno))
    return tracer
import threading
threading.settrace(tracer)
sys.settrace(tracer)
train_oe.PRESETS["laptop"].update(steps=2, eval_tokens=2000)
code = train_oe.main(["--preset", "laptop", "--out", out])
sys.settrace(None)
files = sorted({os.path.basename(name) for name, _ in seen})
by_file = {f: sum(os.path.basename(n) == f for n, _ in seen) for f in files}
print(json.dumps([len(seen), len(lines), by_file]))
"""


def docstring_lines(tree):
    """Numbers of the lines that belong to docstrings."""
    found = set()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            text = node.body[0]
            found.update(range(text.lineno, text.end_lineno + 1))
    return found


def wide_logic(path):
    """Numbers of the lines of function bodies that are wider than WIDTH."""
    source = path.read_text(encoding="utf-8")
    tree, lines, inside = ast.parse(source), source.splitlines(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inside.update(range(node.lineno, node.end_lineno + 1))
    wide = {i for i, line in enumerate(lines, 1) if len(line) > WIDTH}
    comments = {i for i, line in enumerate(lines, 1) if line.lstrip().startswith("#")}
    return sorted(wide & inside - docstring_lines(tree) - comments)


def named_lambdas(path):
    """How many assignments give a lambda a name."""
    count = 0
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            parts = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            count += sum(isinstance(part, ast.Lambda) for part in parts)
    return count


def size(paths):
    """(files, lines, bytes) of some files."""
    texts = [p.read_bytes() for p in paths]
    return len(texts), sum(t.count(b"\n") for t in texts), sum(map(len, texts))


def executed(folder):
    """What a short run of the laptop preset executes, as text."""
    if not (folder / "stores" / "stdlib-8192").exists():
        return "not counted: there is no stores/stdlib-8192"
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", COUNTS, str(folder), out]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    functions, lines, files = json.loads(done.stdout.splitlines()[-1])
    return f"{functions} functions, {lines} lines in {len(files)} files {files}"


def main(folder):
    code = sorted(folder.glob("*.py"))
    tests = sorted((folder / "tests").glob("*.py"))
    for name, paths in (("code", code), ("tests", tests), ("README.md", [folder / "README.md"])):
        files, lines, count = size(paths)
        print(f"{name}: {files} files, {lines:,} lines, {count:,} bytes")
    wide = {p.name: len(found) for p in code if (found := wide_logic(p))}
    print(f"logic lines over {WIDTH} columns: {sum(wide.values())} {wide}")
    wide = {p.name: len(found) for p in tests if (found := wide_logic(p))}
    print(f"the same in tests: {sum(wide.values())} {wide}")
    print(f"named lambdas: {sum(map(named_lambdas, code))}")
    print(f"run by --preset laptop: {executed(folder)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve())
