from __future__ import annotations

import io
import json
import stat

import openai
import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serve") / "state"


@pytest.fixture(scope="module")
def client(server, alongside, folder, limits):
    with alongside(server, state_folder=folder, limits=limits(max_batch_rows=500)) as other:
        yield other.client()


def rows(count, url="/v1/completions", **body):
    def line(index):
        asked = {"model": "mock", "prompt": f"p{index}", "max_tokens": 3, **body}
        return {"custom_id": f"c{index}", "method": "POST", "url": url, "body": asked}

    return [line(index) for index in range(count)]


def upload(client, lines, name="in.jsonl"):
    data = "".join(json.dumps(line) + "\n" if isinstance(line, dict) else line for line in lines)
    return client.files.create(file=(name, io.BytesIO(data.encode())), purpose="batch")


def begin(client, file, endpoint="/v1/completions", window="24h", **more):
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window=window, **more
    )


def ended(client, eventually, batch, timeout_s=30):
    eventually(lambda: client.batches.retrieve(batch.id).status in ENDS, timeout_s)
    return client.batches.retrieve(batch.id)


ENDS = ("completed", "failed", "cancelled", "expired")


def lines_of(client, file_id):
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def test_a_batch_from_upload_to_results(client, eventually):
    bad = rows(2, nonsense=1)[1] | {"custom_id": "bad"}
    file = upload(client, [*rows(20), bad, "not json\n"])
    assert (file.purpose, file.filename, file.status) == ("batch", "in.jsonl", "processed")
    batch = begin(client, file, metadata={"who": "me"})
    assert (batch.status, batch.metadata) == ("validating", {"who": "me"})
    batch = ended(client, eventually, batch)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (22, 20, 2)
    answers = lines_of(client, batch.output_file_id)
    assert {line["custom_id"] for line in answers} == {f"c{i}" for i in range(20)}
    assert all(line["response"]["status_code"] == 200 for line in answers)
    assert answers[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    failures = {line["custom_id"]: line for line in lines_of(client, batch.error_file_id)}
    assert set(failures) == {"bad", "line-22"}
    assert "nonsense is not known" in failures["bad"]["error"]["message"]
    assert batch.usage.output_tokens == 60


def test_rows_mean_what_requests_mean(client, server, eventually):
    asked = {"temperature": 0, "max_tokens": 4}
    batch = ended(client, eventually, begin(client, upload(client, rows(1, **asked))))
    [line] = lines_of(client, batch.output_file_id)
    online = server.client().completions.create(model="mock", prompt="p0", **asked)
    assert line["response"]["body"]["choices"][0]["text"] == online.choices[0].text


def test_chats(client, eventually):
    messages = [{"role": "user", "content": "hi"}]
    [line] = rows(1, url="/v1/chat/completions", messages=messages)
    del line["body"]["prompt"]
    batch = begin(client, upload(client, [line]), endpoint="/v1/chat/completions")
    batch = ended(client, eventually, batch)
    [answer] = lines_of(client, batch.output_file_id)
    assert answer["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert batch.error_file_id is None


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        (rows(3) + rows(1), "custom_id 'c0' is used twice, on line 1 and on line 4"),
        (["\n"], "the file has no rows"),
        (rows(501), "at most 500 rows"),
        (rows(2, url="/v1/chat/completions"), "must be a request for /v1/completions"),
    ],
)
def test_a_file_that_is_no_batch_fails_as_a_whole(client, eventually, lines, part):
    batch = ended(client, eventually, begin(client, upload(client, lines)))
    assert batch.status == "failed"
    assert part in batch.errors.data[0].message
    assert "/" not in batch.errors.data[0].message.replace("/v1/completions", "")


def test_cancel_keeps_what_is_answered(client, eventually):
    batch = begin(client, upload(client, rows(400, max_tokens=40)))
    eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0, 30)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, eventually, batch)
    assert batch.status == "cancelled" and batch.cancelled_at and batch.cancelling_at
    counts = batch.request_counts
    assert 0 < counts.completed < 400 and counts.completed + counts.failed == counts.total == 400
    assert len(lines_of(client, batch.output_file_id)) == counts.completed
    errors = lines_of(client, batch.error_file_id)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert {line["response"] for line in errors} == {None}
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_expiry_ends_a_batch(client, eventually):
    batch = begin(client, upload(client, rows(400, max_tokens=60)), window="2s")
    batch = ended(client, eventually, batch)
    assert batch.status == "expired" and batch.expired_at >= batch.expires_at
    assert batch.request_counts.failed > 0
    codes = {line["error"]["code"] for line in lines_of(client, batch.error_file_id)}
    assert codes == {"batch_expired"}


@pytest.mark.slow
def test_a_batch_goes_on_after_a_restart(server, alongside, tmp_path, eventually):
    given = {"state_folder": tmp_path / "state"}
    with alongside(server, **given) as first:
        client = first.client()
        file = upload(client, rows(300, max_tokens=40))
        batch = begin(client, file)
        client.files.delete(file.id)  # the batch keeps its own
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0, 30)
    with alongside(server, **given) as second:
        client = second.client()
        batch = ended(client, eventually, batch, 60)
        assert (batch.status, batch.request_counts.completed) == ("completed", 300)
        answers = lines_of(client, batch.output_file_id)
        assert sorted(line["custom_id"] for line in answers) == sorted(f"c{i}" for i in range(300))
        assert [b.id for b in client.batches.list()] == [batch.id]


def test_two_servers_share_a_folder(client, server, alongside, folder, eventually):
    with alongside(server, state_folder=folder) as other:
        batch = begin(other.client(), upload(other.client(), rows(3)))
        assert ended(client, eventually, batch).status == "completed"
        assert other.client().batches.retrieve(batch.id).status == "completed"


def test_lists_come_in_pages(client):
    files = [upload(client, rows(1), name=f"{i}.jsonl") for i in range(5)]
    ids = {file.id for file in files}
    listed = [file.id for file in client.files.list(limit=2, purpose="batch") if file.id in ids]
    assert set(listed) == ids and len(listed) == 5
    page = client.files.list(limit=2, order="asc")
    assert page.has_more and len(page.data) == 2
    for bad in ({"limit": 0}, {"limit": 10**6}, {"after": "file-none"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            client.files.list(**bad)


def test_files_can_be_deleted(client):
    file = upload(client, rows(1))
    assert client.files.retrieve(file.id).bytes == file.bytes
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError, match="input_file_id"):
        begin(client, file)


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "../../etc/passwd", "file-%00", "file-" + "0" * 32, "batch_x", "a/b"]
)
def test_no_id_is_a_path(client, name):
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        answer = client._client.get(str(client.base_url).removesuffix("/v1/") + path)
        assert answer.status_code in (404, 405)


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "/v1/embeddings"},
        {"completion_window": "soon"},
        {"completion_window": "31d"},
        {"completion_window": "0s"},
        {"input_file_id": "../../etc/passwd"},
        {"metadata": {"a": 1}},
        {"metadata": {str(i): "x" for i in range(17)}},
        {"extra_body": {"priority": 1}},
    ],
)
def test_wrong_batches_are_refused(client, change):
    given = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(**{**given, **change})
    assert caught.value.param == next(iter(change.get("extra_body", change)))


def test_uploads_are_bounded_and_checked(server, alongside, tmp_path, limits):
    small = limits(max_file_bytes=2000, max_stored_bytes=3000)
    with alongside(server, state_folder=tmp_path / "state", limits=small) as other:
        client = other.client()
        for size, status in ((2100, 413), (70_000_000, 413), (1900, None), (1900, 507)):
            try:
                client.files.create(file=("x.jsonl", b"x" * size), purpose="batch")
                assert status is None
            except openai.APIStatusError as error:
                assert error.status_code == status
        for wrong in ({"purpose": "fine-tune"}, {"file": ("e.jsonl", b"")}):
            with pytest.raises(openai.BadRequestError):
                client.files.create(**{"file": ("x.jsonl", b"x"), "purpose": "batch", **wrong})


def test_a_form_that_cannot_be_read_is_told_why(client):
    http, url = client._client, f"{client.base_url}files"
    twice = [("file", ("a", b"{}")), ("file", ("b", b"{}"))]
    answer = http.post(url, data={"purpose": "batch"}, files=twice)
    assert answer.status_code == 400
    assert "number of files is 1" in answer.json()["error"]["message"]
    assert http.post(url, data={"purpose": "batch"}).status_code == 415


def test_nobody_is_sent_elsewhere(client):
    answer = client._client.get(f"{client.base_url}files/", headers={"host": "127.0.0.1:1"})
    assert answer.status_code == 404 and "location" not in answer.headers


def test_state_is_for_the_owner_alone(client, folder):
    upload(client, rows(1), name="../../evil\n.jsonl")
    paths = [folder, *folder.rglob("*")]
    assert len(paths) > 5
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
