-- Whether other tables may hold rows of an instance, or of somebody who waits for it. What others created may have any.
-- migrate:up

ALTER TABLE workflow_instances ADD COLUMN has_ties BOOLEAN NOT NULL DEFAULT TRUE;

-- migrate:down

ALTER TABLE workflow_instances DROP COLUMN has_ties;
