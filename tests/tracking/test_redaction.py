import pytest

from pipeline.tracking.redaction import names_a_secret, scrub


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ada:s3cret@db:5432/mlflow", "postgresql://ada:***@db:5432/mlflow"),
        ("http://ada:p@ss@host/x", "http://ada:***@host/x"),
        ("https://ghp_abcdefghijklmnopqrst@github.com/x", "https://***@github.com/x"),
        ("https://host/file?token=abc&x=1", "https://host/file?token=***&x=1"),
        ("s3://b/k?X-Amz-Signature=deadbeef", "s3://b/k?X-Amz-Signature=***"),
        ("see redis://:pw@cache:6379/0 and ftp://u:p@h", "see redis://:***@cache:6379/0 and ftp://u:***@h"),
    ],
)
def test_secrets_of_uris_are_masked_and_the_rest_stays(text, shown):
    assert scrub(text) == shown


@pytest.mark.parametrize("text", ["git+ssh://git@github.com/x", "sqlite:////tmp/a.db", "ada@example.org: hi", "a:b@c"])
def test_text_without_secrets_is_unchanged(text):
    assert scrub(text) == text


@pytest.mark.parametrize(
    "name", ["password", "db.password", "api_key", "hf_token", "aws.secret", "AWS_SECRET_ACCESS_KEY"]
)
def test_names_of_secrets_are_known(name):
    assert names_a_secret(name)


@pytest.mark.parametrize("name", ["num_tokens", "global_batch_tokens", "tokenizer", "secretary", "key", "monkey"])
def test_ordinary_names_are_no_secrets(name):
    assert not names_a_secret(name)
