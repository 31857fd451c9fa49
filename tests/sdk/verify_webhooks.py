"""Verifies requests with the public Standard Webhooks library.

One JSON object a line on stdin: {"headers": {…}, "body": base64, "secrets": […]}. Each request must verify with each
secret, and with none once a byte of its body, its id or its time is another.
"""

import base64
import json
import sys

from standardwebhooks.webhooks import Webhook, WebhookVerificationError

verified = 0
for line in sys.stdin:
    request = json.loads(line)
    body, headers = base64.b64decode(request["body"]), request["headers"]
    for secret in request["secrets"]:
        # The library verifies text, and compressed bodies are none: it is told what the signature covers.
        webhook = Webhook(secret)
        try:
            text = body.decode("utf-8")
        except UnicodeDecodeError:
            import hashlib
            import hmac

            signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
            expected = "v1," + base64.b64encode(hmac.new(webhook._whsecret, signed, hashlib.sha256).digest()).decode()
            assert expected in headers["webhook-signature"].split(" ")
            verified += 1
            continue
        json.loads(text)
        webhook.verify(text, headers)
        for wrong in (
            (text + " ", headers),
            (text, {**headers, "webhook-id": headers["webhook-id"] + "x"}),
            (text, {**headers, "webhook-timestamp": str(int(headers["webhook-timestamp"]) + 1)}),
        ):
            try:
                webhook.verify(*wrong)
            except WebhookVerificationError:
                continue
            sys.exit("a forged request is verified")
        verified += 1
print("verified", verified)
