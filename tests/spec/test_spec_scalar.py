import pytest

from pipeline.spec.scalar import canonical_text, core_value, is_null, to_boolean, to_float, to_integer


@pytest.mark.parametrize(
    ("text", "value"), [("150", 150), ("-3", -3), ("+7", 7), ("007", 7), ("0x1F", 31), ("0o17", 15), ("0", 0)]
)
def test_integer_forms(text, value):
    assert to_integer(text) == value


@pytest.mark.parametrize(
    "text",
    ["1.0", "1e3", "", " 5", "5 ", "1_000", "ten", "0b11", "٣", "true", "9" * 30, "9" * 5000, "9223372036854775808"],
)
def test_what_is_no_integer(text):
    with pytest.raises(ValueError, match=r"whole number|64 bits"):
        to_integer(text)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-5", 1e-5), ("1E5", 1e5), (".5", 0.5), ("3", 3.0), ("-0.25", -0.25), ("1.", 1.0)]
)
def test_float_forms(text, value):
    result = to_float(text)
    assert result == value
    assert isinstance(result, float)


@pytest.mark.parametrize(
    "text", [".inf", "-.inf", ".nan", "inf", "nan", "1e999", "", "1e", "e5", "1,5", "0x1F", "1_0.0"]
)
def test_what_is_no_finite_number(text):
    with pytest.raises(ValueError, match="number"):
        to_float(text)


@pytest.mark.parametrize("text", ["yes", "no", "on", "off", "1", "0", "y", "tRUE", ""])
def test_only_true_and_false_are_booleans(text):
    with pytest.raises(ValueError, match="no boolean"):
        to_boolean(text)


def test_undeclared_scalars_follow_yaml_1_2():
    assert core_value("1e-5") == 1e-5
    assert core_value("true") is True
    assert core_value("yes") == "yes"
    assert core_value("150") == 150
    assert core_value("2024-01-01") == "2024-01-01"
    assert core_value("12:30:45") == "12:30:45"
    assert core_value("~") is None
    assert is_null("") and not is_null("none")


def test_equal_values_have_equal_text():
    assert canonical_text(to_float("0.00001")) == canonical_text(to_float("1e-5"))
    assert canonical_text(True) == "true"
    assert canonical_text(5) == "5"
