from lightning_dist.telemetry.published import forget_published, publish, published


def test_newest_value_of_a_name_is_kept_as_a_number():
    forget_published()
    publish("goodput", 1)
    publish("goodput", 0.5)
    publish("mfu", 0.25)
    assert published() == {"goodput": 0.5, "mfu": 0.25}


def test_what_is_given_out_is_a_copy():
    publish("goodput", 0.5)
    published()["goodput"] = 2.0
    assert published()["goodput"] == 0.5
