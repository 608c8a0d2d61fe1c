"""Where a run was made."""

import subprocess

from gtracer.lab.results import provenance


def test_commit_is_ours_or_none(monkeypatch, tmp_path):
    """A copy that lies, untracked, in another project's checkout does not take that project's commit."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    copy = tmp_path / "gtracer" / "lab" / "environment.py"
    copy.parent.mkdir(parents=True)
    copy.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(copy))
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "theirs"], cwd=tmp_path, check=True)
    assert provenance.commit() is None
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert provenance.commit() is not None
